"""Everything answers, and no KV comes from the peer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.captures import HANDLE, answers, sent_to
from pdctl.doctor.checks.reading import seen
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
    r"|x-prefiller-host-port\b.{0,40}\b(?:not (?:found|present|set)|missing|absent|empty)"
    r"|(?:running|falling back|fallback|degrad\w+|routing|serving)\b.{0,400}"
    r"\b(?:decode[- ]only|local prefill|aggregated mode)"
    r"|no prefill (?:worker|endpoint|instance|pod)s?\b.{0,400}(?:available|found|ready)",
)
RESULT_MISSING = Pattern(
    "prefill-result-missing",
    ("prefill_result", "kv_transfer_params"),
    r"(?i)missing the prefill_result"
    r"|\b(?:no|missing|without|empty|did not return|lacks?)\b[\w '\"`]{0,80}\bkv_transfer_params"
    r"|kv_transfer_params (?:(?:is|was|are) (?:missing|none|null|empty|absent)"
    r"|missing|absent|not (?:found|present))",
)
SUCCESS = "vllm:request_success_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"


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
    few = not idle and skipped.count < 3
    if few and not (skipped and _decode_computed(evidence)):
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


def _decode_computed(evidence: Evidence) -> bool:
    """Whether decode computed prompts and got no token from a peer."""
    return any(
        leg.metrics is not None
        and (leg.metrics.value(BY_SOURCE, source="local_compute") or 0) > 10_000
        and not leg.metrics.value(BY_SOURCE, source="external_kv_transfer")
        for leg in evidence.role("decode")
    )


def _requests_served(evidence: Evidence, role: str) -> tuple[float, Excerpt] | None:
    for leg in evidence.role(role):
        for name in (SUCCESS, PROMPT_TOKENS):
            total = leg.metrics.value(name) if leg.metrics else None
            if leg.metrics and total is not None:
                gain = leg.metrics.gain(name)
                return (total if gain is None else gain), leg.metrics.excerpt(name)
    return None


def _prefill_answer_dropped(evidence: Evidence) -> Iterator[Answer]:
    without = [
        (leg, capture)
        for leg, capture in sent_to(evidence, "decode")
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
    given = [
        capture
        for _, capture in answers(evidence, "prefill", "router")
        if HANDLE.search(capture.text)
    ]
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
)
