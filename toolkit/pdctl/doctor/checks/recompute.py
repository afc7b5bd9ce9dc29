"""Everything answers, and every prompt is computed again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.captures import HANDLE, answers, requests
from pdctl.doctor.checks.lines import KV_TRANSFER_METRICS
from pdctl.doctor.checks.reading import (
    LOG_SETTINGS,
    Setting,
    is_true,
    number,
    seen,
    setting,
    settings,
)
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

NO_CONNECTOR = Pattern(
    "no-kv-connector",
    ("no KVConnector found", "no KV connector", "kv connector is not configured"),
    r"(?i)no KV ?Connector found|no KV connector",
)
INVALID_PARAMS = Pattern(
    "invalid-transfer-params",
    ("will not utilize KVTransfer", "invalid KVTransferParams"),
)
BLOCK_SIZE_SET = Pattern(
    "attention-block-size",
    ("attention block size to",),
    r"[Ss]etting attention block size to (?P<tokens>\d+)",
)

SKIPPED_PREFILL = Pattern(
    "prefill-skipped",
    (
        "skip disaggregated prefill",
        "x-prefiller-host-port",
        "decode-only",
        "decode only",
        "local prefill",
        "aggregated mode",
        "no prefill",
        "No prefill",
    ),
    r"(?i)skip\w* (?:disaggregated|remote) prefill|(?:no|missing|without) x-prefiller-host-port"
    r"|(?:running|falling back|fallback|degrad\w+|routing|serving)\b.*"
    r"\b(?:decode[- ]only|local prefill|aggregated mode)"
    r"|no prefill (?:worker|endpoint|instance|pod)s?\b.*(?:available|found|ready)",
)
RESULT_MISSING = Pattern(
    "prefill-result-missing",
    ("prefill_result", "kv_transfer_params"),
    r"(?i)missing the prefill_result|\b(?:no|missing|without|empty|did not return|lacks?)\b[\w ]*"
    r"\bkv_transfer_params|kv_transfer_params (?:(?:is|was|are) (?:missing|none|null|empty|absent)"
    r"|missing|absent|not (?:found|present))",
)
SUCCESS = "vllm:request_success_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
TURNS = "pd_router_turns_total"
_SLOW_GB_S = 2.0


def _no_connector(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, NO_CONNECTOR)
    bare = list(_engines_without(evidence))
    protocol = [
        each
        for each in evidence.text(r"--(?:kv-)?connector[= ]\S+|kv_connector\S*\s*[:=]", "config")
        if not re.search(r"Nixl\w*Connector", each.excerpt.text)
    ]
    if not found and not (len(bare) > 1 and protocol):
        return
    yield Finding(
        found.leg if found else bare[0].source.partition("/")[0],
        "certain" if found else "likely",
        (*found.excerpts[:2], *bare[:1], *(each.excerpt for each in protocol[:1])),
        "The engines run without a KV connector: router and sidecar speak the transfer protocol, "
        "the engines drop its fields, and decode computes every prompt that prefill has just "
        "computed.",
        "Add --kv-transfer-config to the engines (kv_producer on prefill, kv_consumer on decode) "
        "and VLLM_NIXL_SIDE_CHANNEL_HOST; pdctl render makes both. Then "
        f'{BY_SOURCE}{{source="external_kv_transfer"}} must grow on decode.',
    )


def _engines_without(evidence: Evidence) -> Iterator[Excerpt]:
    for leg in evidence.legs:
        for line in leg.config.text.splitlines() if leg.config else ():
            if re.search(r"vllm serve|api_server", line) and not _names_config(leg):
                yield Excerpt(f"{leg.name}/config.txt", line.strip())


def _names_config(leg: LegEvidence) -> bool:
    return leg.config is not None and any(
        "kv_transfer_config" in path for path, _ in leg.config.values
    )


def _decode_only(evidence: Evidence) -> Iterator[Answer]:
    served = {role: _requests_served(evidence, role) for role in ("prefill", "decode")}
    prefill, decode = served["prefill"], served["decode"]
    idle = prefill is not None and decode is not None and prefill[0] == 0 and decode[0] >= 10
    skipped = seen(evidence, SKIPPED_PREFILL)
    if not idle and skipped.count < 3:
        return
    decider = evidence.text(
        r"(?i)decider|disagg\w*[-_ ]?(?:threshold|router)|nonCachedTokens", "config"
    )
    yield Finding(
        decider[0].leg if decider else DEPLOYMENT,
        "certain" if decider or (idle and skipped) else "likely",
        (
            *((prefill[1], decode[1]) if idle and prefill and decode else ()),
            *skipped.excerpts[:1],
            *(each.excerpt for each in decider[:1]),
        ),
        "Nothing is sent to prefill: whoever decides between disaggregated and local always takes "
        "decode alone, and decode computes every prompt. A threshold of 0 (or one above every "
        "prompt), a missing producer of the prefix attribute, a block size of 0, a request path "
        "that the sidecar does not split, or no prefill endpoint does that.",
        "Configure the decider: in llm-d set the pd-decider's nonCachedTokens and add "
        "approx-prefix-cache-producer with autoTune: false and blockSizeTokens. Then prefill's "
        f"{SUCCESS} must grow with decode's.",
    )


def _requests_served(evidence: Evidence, role: str) -> tuple[float, Excerpt] | None:
    for leg in evidence.role(role):
        if not leg.metrics:
            continue
        total = leg.metrics.value(SUCCESS)
        gain = leg.metrics.gain(SUCCESS)
        if total is not None:
            return (total if gain is None else gain), leg.metrics.excerpt(SUCCESS)
    return None


def _prefill_answer_dropped(evidence: Evidence) -> Iterator[Answer]:
    without = [
        (leg, capture)
        for leg, capture in requests(evidence, "decode")
        if not HANDLE.search(capture.text)
    ]
    missing = evidence.log(RESULT_MISSING, "router", "decode", DEPLOYMENT)
    if missing and not without and not re.search(r"(?i)stream", missing.excerpts[0].text):
        yield Finding(
            missing.legs[0],
            "likely",
            missing.excerpts,
            "What prefill answered does not reach decode: the request lacks the result of prefill "
            "(kv_transfer_params), so decode does not know where the blocks are.",
            "Make the router send every request to prefill first and relay kv_transfer_params "
            "from its answer into decode's request; check that prefill and decode are registered "
            "as what they are.",
        )
        return
    if not without:
        return
    given = [capture for _, capture in answers(evidence, "prefill") if HANDLE.search(capture.text)]
    generic = evidence.text(
        r"(?i)(?:kvConnector|connector)\W+(?:type\W+)?(lmcache|http|mooncake\w*)\b", "config"
    )
    yield Finding(
        next((leg.name for leg in evidence.role("router")), DEPLOYMENT),
        "certain" if given else "likely",
        (
            *(Excerpt(c.source, c.text.strip()[:300]) for c in given[:1]),
            Excerpt(without[0][1].source, without[0][1].text.strip()[:300]),
            *(each.excerpt for each in generic[:1]),
        ),
        "The router throws away what prefill answered: the request that reaches decode carries no "
        "kv_transfer_params, so decode does not know where the blocks are and computes them.",
        "Use a router or connector type that relays kv_transfer_params from prefill's answer into "
        "decode's request (pd-router; in kthena not lmcache or http). Capture one decode request "
        "and look for the field.",
    )


def _threshold_ignored(evidence: Evidence) -> Iterator[Answer]:
    for each in settings(evidence, "threshold", "decode"):
        tokens = number(each.value) or 0
        small = _small_transfers(evidence, "decode")
        if tokens > 64 and small:
            yield Finding(
                each.leg,
                "likely",
                (each.excerpt, small),
                f"kv_recompute_threshold ({tokens:g}) does not apply to ordinary transfers from "
                "prefill to decode: vLLM consults it only when prefill reads back from decode, so "
                "short prompts still pay a transfer. A low rate on transfers below one MB is fixed "
                "overhead, not a bad fabric.",
                "Send short prompts to decode alone in the router (pd-router: router.routing). "
                "Leave the threshold for readback.",
                severity="info",
            )


def _small_transfers(evidence: Evidence, role: str) -> Excerpt | None:
    for leg in evidence.role(role):
        hits = leg.hits.get(KV_TRANSFER_METRICS.name)
        for hit in hits.last if hits else ():
            if int(hit.groups["transfers"]) and float(hit.groups["mb"]) < 1:
                return hit.excerpt
        if leg.metrics:
            total = leg.metrics.value("vllm:nixl_bytes_transferred_sum")
            count = leg.metrics.value("vllm:nixl_bytes_transferred_count")
            if total and count and total / count < 1e6:
                return leg.metrics.excerpt("vllm:nixl_bytes_transferred_sum")
    return None


_PREFIX = re.compile(r"(?i)common prefix\D*?(?:with turn \d+\D*)?(\d+)\s*(?:of|/)\s*(\d+)")


def _template(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.legs:
        for capture in leg.http:
            match = _PREFIX.search(capture.text)
            if not match or int(match[1]) >= 0.9 * int(match[2]):
                continue
            queries = leg.metrics.value("vllm:prefix_cache_queries_total") if leg.metrics else None
            shown = [capture.excerpt]
            if queries and leg.metrics:
                shown.append(leg.metrics.excerpt("vllm:prefix_cache_hits_total"))
            yield Finding(
                leg.name,
                "certain",
                tuple(shown),
                f"The prompt of a turn shares only {match[1]} of {match[2]} tokens with the turn "
                "before: the chat template renders earlier assistant turns differently from how "
                "they were generated (an empty think block on the newest turn only, or reasoning "
                "left out), so nothing behind that point can be reused.",
                "Use a template that renders history as it was generated, or send "
                "reasoning_content back. Compare /tokenize of two consecutive turns.",
            )


def _inert_cache(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, BLOCK_SIZE_SET)
    for leg in evidence.legs:
        hits = leg.hits.get(BLOCK_SIZE_SET.name)
        longest = setting(evidence, "max_model_len", leg.role)
        block = float(hits.value("tokens") or 0) if hits else None
        source = hits.excerpts[:1] if hits else ()
        if block is None and (stated := setting(evidence, "block_size", leg.role)):
            block, source = number(stated.value), (stated.excerpt,)
        limit = number(longest.value) if longest else None
        if not block or not limit or block <= limit:
            continue
        metric = (
            (leg.metrics.excerpt("vllm:prefix_cache_hits_total"),)
            if leg.metrics and leg.metrics.value("vllm:prefix_cache_queries_total")
            else ()
        )
        yield Finding(
            leg.name,
            "certain",
            (*source, *((longest.excerpt,) if longest else ()), *metric),
            f"A KV block holds {block:g} tokens and the longest prompt {limit:g}: only whole "
            "blocks are cached or transferred, so prefix caching and reuse never happen.",
            "Raise --max-model-len above the block size, or accept that this model has no reuse "
            "at this length.",
        )
    _ = found


def _slow_on_one_node(evidence: Evidence) -> Iterator[Answer]:
    nodes = [each for each in settings(evidence, "node", "prefill", "decode")]
    for leg in evidence.legs:
        for path, value in leg.config.values if leg.config else ():
            if re.fullmatch(r"nodes?\.(prefill|decode)", path) and not any(
                each.excerpt.text.startswith(path) for each in nodes
            ):
                role = path.rpartition(".")[2]
                shown = Excerpt(f"{leg.name}/config.txt", f"{path}: {value}")
                nodes.append(Setting(role, role, value, shown))
    roles = {each.role for each in nodes}
    one_node = roles >= {"prefill", "decode"} and len({str(each.value) for each in nodes}) == 1
    if not one_node:
        return
    for leg in evidence.role("decode", "prefill"):
        slow = _rate(leg)
        if slow and slow[0] < _SLOW_GB_S:
            yield Finding(
                leg.name,
                "likely",
                (slow[1], *(each.excerpt for each in nodes[:2])),
                f"Both legs are on one node without RDMA between them, and the pull connector "
                f"moves {slow[0]:.1f} GB/s: UCX's cuda_ipc is fast for PUT, its remote GET falls "
                "back to TCP in this layout. The familiar connector name (NixlConnector) reads.",
                "Use NixlPushConnector on both legs (never push on one and pull on the other; no "
                "readback then), or give the pods RDMA or a shared IPC namespace. It is not a "
                "fault of the fabric.",
            )
            return


def _rate(leg: LegEvidence) -> tuple[float, Excerpt] | None:
    """GB/s of transfers that are large enough to tell."""
    hits = leg.hits.get(KV_TRANSFER_METRICS.name)
    for hit in hits.last if hits else ():
        if int(hit.groups["transfers"]) and float(hit.groups["mb"]) >= 8:
            return float(hit.groups["rate"]) / 1e3, hit.excerpt
    if leg.metrics:
        size = leg.metrics.value("vllm:nixl_bytes_transferred_sum")
        seconds = leg.metrics.value("vllm:nixl_xfer_time_seconds_sum")
        count = leg.metrics.value("vllm:nixl_xfer_time_seconds_count") or 1
        if size and seconds and size / count > 8e6:
            return size / seconds / 1e9, leg.metrics.excerpt("vllm:nixl_bytes_transferred_sum")
    return None


def _threshold_too_high(evidence: Evidence) -> Iterator[Answer]:
    for each in settings(evidence, "threshold", "prefill"):
        longest = setting(evidence, "max_model_len", "prefill")
        tokens = number(each.value) or 0
        limit = number(longest.value) if longest else None
        if limit and tokens >= limit and longest:
            yield Finding(
                each.leg,
                "certain",
                (each.excerpt, longest.excerpt),
                f"kv_recompute_threshold ({tokens:g}) is not below the longest prompt ({limit:g}): "
                "no turn can ever reach it, so nothing is read back.",
                "Lower it (64 is the default; pdctl bench tune measures the right one).",
            )
            return
    below = _turns(evidence, "below_threshold")
    hits = _turns(evidence, "hit")
    if below and below[0] >= 20 and below[0] > 9 * (hits[0] if hits else 0):
        stated = setting(evidence, "threshold", "prefill")
        yield Finding(
            stated.leg if stated else below[2],
            "likely",
            (below[1], *((stated.excerpt,) if stated else ())),
            "Nearly every turn falls below kv_recompute_threshold, so it is recomputed.",
            "Compare the threshold with the length of your turns and lower it (64 is the default; "
            "pdctl bench tune measures the right one).",
            severity="warning",
        )


def _turns(evidence: Evidence, outcome: str) -> tuple[float, Excerpt, str] | None:
    """Turns with an outcome, how it shows, and the leg that counted them."""
    for leg in evidence.role("router", "prefill"):
        for name in (TURNS, "pd_engine_decisions_total"):
            if leg.metrics and (total := leg.metrics.value(name, outcome=outcome)) is not None:
                gain = leg.metrics.gain(name, outcome=outcome)
                shown = leg.metrics.excerpt(name, outcome=outcome)
                return (total if gain is None else gain), shown, leg.name
    return None


def _history(evidence: Evidence) -> Iterator[Answer]:
    changed, hits = _turns(evidence, "history_changed"), _turns(evidence, "hit")
    if changed and changed[0] >= 10 and changed[0] > (hits[0] if hits else 0):
        yield Finding(
            changed[2],
            "likely",
            (changed[1], *((hits[1],) if hits else ())),
            "Most turns do not continue the turn before, token for token: clients edit or compact "
            "their history, or strip the reasoning that decode's blocks contain. Reading those "
            "blocks would give wrong text, so the prompt is recomputed.",
            "Send the assistant's answers back unchanged, reasoning included (reasoning_content "
            "and a template that renders it); compact history rarely, then start a new "
            "conversation id.",
            severity="warning",
        )


def _invalid(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, INVALID_PARAMS)
    if found:
        yield Finding(
            found.leg,
            "certain",
            found.excerpts,
            "The router sends kv_transfer_params that lack a field (block ids, engine id, host or "
            "port): the engine ignores them and computes the prompt.",
            "Forward kv_transfer_params as they came in the answer; do not rebuild them.",
        )


def _nothing_transferred(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.role("decode"):
        if not leg.metrics:
            continue
        local = leg.metrics.gain(BY_SOURCE, source="local_compute")
        remote = leg.metrics.gain(BY_SOURCE, source="external_kv_transfer")
        if local is None:
            local = leg.metrics.value(BY_SOURCE, source="local_compute")
            remote = leg.metrics.value(BY_SOURCE, source="external_kv_transfer")
        if local and remote == 0 and local > 10_000:
            yield Finding(
                leg.name,
                "likely",
                (
                    leg.metrics.excerpt(BY_SOURCE, source="external_kv_transfer"),
                    leg.metrics.excerpt(BY_SOURCE, source="local_compute"),
                ),
                "Decode computes every prompt itself: no token came from prefill, whatever the "
                "access logs say of a split.",
                "Follow one request: prefill's answer must hold kv_transfer_params, decode's "
                "request must carry them, decode's log must show no 'invalid KVTransferParams' "
                "and no failed handshake. pdctl verify SPEC proves it end to end.",
            )
    for leg in evidence.role("prefill", "router"):
        if not leg.metrics:
            continue
        sent = leg.metrics.gain("pd_router_handles_sent_total")
        read = leg.metrics.gain("pd_router_prompt_tokens_total", kind="read")
        bidirectional = setting(evidence, "bidirectional")
        if (
            sent
            and sent >= 10
            and read == 0
            and not (bidirectional and is_true(bidirectional.value) is False)
        ):
            yield Finding(
                leg.name,
                "likely",
                (
                    leg.metrics.excerpt("pd_router_handles_sent_total"),
                    leg.metrics.excerpt("pd_router_prompt_tokens_total", kind="read"),
                ),
                "Handles are sent to prefill and no token is ever read back.",
                "Look at prefill's outcomes (pd_engine_decisions_total) and its log; pdctl verify "
                "SPEC shows a turn's way.",
            )


CHECKS = (
    Check(
        "PD4501",
        "The engines have no KV connector",
        Category.SILENT_RECOMPUTE,
        "error",
        "no-kv-connector",
        _no_connector,
        needs=("log|config",),
        patterns=(NO_CONNECTOR,),
        explains=("PD4511", "PD4502", "PD4503", "PD3011"),
    ),
    Check(
        "PD4502",
        "Nothing is sent to prefill",
        Category.SILENT_RECOMPUTE,
        "error",
        "decode-only",
        _decode_only,
        needs=("metrics|log",),
        patterns=(SKIPPED_PREFILL,),
        explains=("PD4511",),
    ),
    Check(
        "PD4503",
        "The router drops what prefill answered",
        Category.SILENT_RECOMPUTE,
        "error",
        "prefill-answer-dropped",
        _prefill_answer_dropped,
        needs=("http|log",),
        patterns=(RESULT_MISSING,),
        premises=("PD9003", "PD6001"),
        explains=("PD4511",),
    ),
    Check(
        "PD4504",
        "The threshold does not apply to prefill to decode",
        Category.SILENT_RECOMPUTE,
        "info",
        "threshold-not-for-p2d",
        _threshold_ignored,
        needs=("config|log",),
        patterns=(KV_TRANSFER_METRICS, *LOG_SETTINGS),
        explains=("PD7504",),
    ),
    Check(
        "PD4505",
        "The chat template changes the history",
        Category.SILENT_RECOMPUTE,
        "error",
        "template-changes-history",
        _template,
        needs=("http",),
        explains=("PD4512",),
    ),
    Check(
        "PD4506",
        "A KV block is longer than any prompt",
        Category.SILENT_RECOMPUTE,
        "warning",
        "block-longer-than-prompt",
        _inert_cache,
        needs=("log|config",),
        patterns=(BLOCK_SIZE_SET, *LOG_SETTINGS),
    ),
    Check(
        "PD4507",
        "Slow reads within one node",
        Category.SILENT_RECOMPUTE,
        "warning",
        "slow-on-one-node",
        _slow_on_one_node,
        needs=("log|metrics",),
        patterns=(KV_TRANSFER_METRICS, *LOG_SETTINGS),
        explains=("PD7504",),
    ),
    Check(
        "PD4508",
        "The recompute threshold is above the prompts",
        Category.SILENT_RECOMPUTE,
        "error",
        "threshold-too-high",
        _threshold_too_high,
        needs=("config|metrics|log",),
        patterns=LOG_SETTINGS,
        premises=("PD4560",),
        explains=("PD4511", "PD4562"),
    ),
    Check(
        "PD4510",
        "Incomplete kv_transfer_params",
        Category.SILENT_RECOMPUTE,
        "error",
        "transfer-params-invalid",
        _invalid,
        needs=("log",),
        patterns=(INVALID_PARAMS,),
        explains=("PD4511",),
    ),
    Check(
        "PD4511",
        "No token comes from the peer",
        Category.SILENT_RECOMPUTE,
        "error",
        "nothing-transferred",
        _nothing_transferred,
        needs=("metrics",),
        patterns=LOG_SETTINGS,
    ),
    Check(
        "PD4512",
        "Turns do not continue their history",
        Category.SILENT_RECOMPUTE,
        "warning",
        "history-changed",
        _history,
        needs=("metrics",),
    ),
)
