"""What the legs are set to: against each other, the spec, the router and the laws of the engine."""

from collections.abc import Iterator
from typing import Any

from pd_connector import contract, telemetry
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.legs import PATTERNS, Setting, plain, setting
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding

RARE_HITS = 20
"""Prompts on prefill before "none was read" says anything."""

_SPEC_KEYS = {
    "bidirectional": "bidirectional",
    "threshold": "recompute_threshold",
    "decode_ttl": "decode_ttl",
}
_SAME = (
    ("kv_cache_dtype", "auto", "The KV cache types differ: blocks are read as what they are not."),
    ("block_size", None, "The KV block sizes differ."),
    ("max_model_len", None, "The longest prompt differs: one leg refuses what the other takes."),
    ("dtype", "auto", "The types of weights and activations differ."),
    ("backends", None, "The NIXL backends differ: the legs share no transport."),
    ("kv_buffer_device", "cuda", "Transfer buffers lie on different devices."),
)
"""(setting, vLLM's default, what a difference means)."""


def _by_role(evidence: Evidence, name: str) -> dict[str, list[tuple[LegEvidence, Setting]]]:
    return {
        role: [(leg, found) for leg in evidence.role(role) if (found := setting(leg, name))]
        for role in ("prefill", "decode")
    }


def _one_sided(evidence: Evidence) -> Iterator[Answer]:
    known = _by_role(evidence, "bidirectional")
    pairs = [*known["prefill"], *known["decode"]]
    on = [(leg, found) for leg, found in pairs if found.value is True]
    off = [(leg, found) for leg, found in pairs if found.value is False]
    if not (known["prefill"] and known["decode"] and on and off):
        return
    wanted = evidence.spec.kv_transfer.bidirectional if evidence.spec else True
    wrong = off if wanted else on
    leg = wrong[0][0]
    if any(each.role == "prefill" for each, _ in off):
        means = (
            "A prefill leg without it that is given decode's handle does not read it; vLLM's own "
            "connector hangs on such a turn, without a line in its log, and its blocks stay."
        )
    else:
        means = "A decode leg without it returns no handle: every turn is a MISS, recomputed."
    yield Finding(
        leg.name,
        "certain",
        tuple(found.excerpt for _, found in (*on[:2], *off[:2])),
        f"Bidirectional transfer is on at {_names(on)} and off at {_names(off)}. {means}",
        "Set kv_transfer.bidirectional once in the spec and run `pdctl up SPEC`: it restarts the "
        "legs that differ. Without pdctl: bidirectional_kv_xfer must be the same in the "
        "kv_connector_extra_config of every leg.",
    )


def _names(pairs: list[tuple[LegEvidence, Setting]]) -> str:
    return ", ".join(leg.name for leg, _ in pairs)


def _not_the_specs(evidence: Evidence) -> Iterator[Answer]:
    if evidence.spec is None:
        return
    for leg in evidence.engines:
        for name, key in _SPEC_KEYS.items():
            found, wanted = setting(leg, name), getattr(evidence.spec.kv_transfer, key)
            if found is not None and found.value != wanted:
                yield Finding(
                    leg.name,
                    "certain",
                    (
                        found.excerpt,
                        Excerpt("deployment/spec.yaml", f"kv_transfer.{key}: {wanted}"),
                    ),
                    f"The leg runs with {key} {found.value}, the spec says {wanted}: it was "
                    "started from another spec.",
                    "Run `pdctl up SPEC`: it restarts what differs.",
                )


def _legs_differ(evidence: Evidence) -> Iterator[Answer]:
    for name, default, means in _SAME:
        values: dict[str, list[tuple[str, Any]]] = {}
        for leg in evidence.engines:
            if not leg.config or "kv_connector" not in leg.config:
                continue
            value = leg.config.get(name, default)
            if value is not None:
                values.setdefault(str(value), []).append((leg.name, value))
        if len(values) > 1:
            shown = "; ".join(
                f"{value} at {', '.join(leg for leg, _ in legs)}" for value, legs in values.items()
            )
            yield Finding(
                min(values.values(), key=len)[0][0],
                "certain",
                tuple(
                    Excerpt(f"{legs[0][0]}/config.txt", f"{name}: {value}")
                    for value, legs in values.items()
                ),
                f"{means} {name}: {shown}.",
                f"Give every leg the same {name} and restart them.",
            )


def _ttl_unreadable(evidence: Evidence) -> Iterator[Answer]:
    gap = evidence.spec.workload.turn_gap if evidence.spec else None
    for leg, found in _by_role(evidence, "decode_ttl")["decode"]:
        on = setting(leg, "bidirectional")
        if on is None or on.value is not True or not isinstance(found.value, int | float):
            continue
        margin = contract.READ_MARGIN_SECONDS
        if found.value <= margin:
            yield Finding(
                leg.name,
                "certain",
                (found.excerpt,),
                f"Decode keeps a turn's blocks for {found.value:g} s, and prefill declines blocks "
                f"with less than {margin:g} s left: every readback is declined as expired.",
                "Set kv_transfer.decode_ttl above the time between turns (default 480s), and "
                "router.handle_ttl below it; then `pdctl up SPEC`.",
            )
        elif gap is not None and found.value < gap + margin:
            yield Finding(
                leg.name,
                "likely",
                (found.excerpt, Excerpt("deployment/spec.yaml", f"workload.turn_gap: {gap:g} s")),
                f"Decode keeps a turn's blocks for {found.value:g} s, but turns are expected "
                f"{gap:g} s apart: most come too late and are recomputed.",
                f"Set kv_transfer.decode_ttl to {gap + 2 * margin:g}s or more, and "
                "router.handle_ttl below it.",
                severity="warning",
            )


def router_handle_ttl(leg: LegEvidence) -> Setting | None:
    """How long the router keeps handles, in seconds."""
    name = telemetry.ROUTER_HANDLE_TTL.name
    if leg.metrics and (value := leg.metrics.value(name)) is not None:
        return Setting(value, leg.metrics.excerpt(name))
    value = plain(leg.config.get("handle_ttl")) if leg.config else None
    if isinstance(value, int | float):
        return Setting(float(value), Excerpt(f"{leg.name}/config.txt", f"handle_ttl {value:g}"))
    return None


def _router_ttl(evidence: Evidence) -> Iterator[Answer]:
    decode = [
        (leg, found)
        for leg, found in _by_role(evidence, "decode_ttl")["decode"]
        if isinstance(found.value, int | float)
    ]
    if not decode:
        return
    shortest_leg, shortest = min(decode, key=lambda pair: float(pair[1].value))
    for leg in evidence.role("router"):
        kept = router_handle_ttl(leg)
        if kept is not None and kept.value >= shortest.value:
            yield Finding(
                leg.name,
                "certain",
                (kept.excerpt, shortest.excerpt),
                f"The router keeps handles for {kept.value:g} s, {shortest_leg.name} their blocks "
                f"for {shortest.value:g} s: later turns are sent handles of blocks that are gone "
                '("Declining expired remote read").',
                f"Set router.handle_ttl below kv_transfer.decode_ttl (480s and 450s go "
                f"together; here below {shortest.value:g}s), then `pdctl up SPEC`.",
            )


def _threshold(evidence: Evidence) -> Iterator[Answer]:
    for leg, found in _by_role(evidence, "threshold")["prefill"]:
        on = setting(leg, "bidirectional")
        if on is None or on.value is not True or not isinstance(found.value, int | float):
            continue
        longest = plain(leg.config.get("max_model_len")) if leg.config else None
        if longest is None and evidence.spec:
            longest = evidence.spec.model.max_model_len
        if isinstance(longest, int) and found.value >= longest:
            yield Finding(
                leg.name,
                "certain",
                (found.excerpt, Excerpt(f"{leg.name}/config.txt", f"max_model_len: {longest}")),
                f"The recompute threshold, {found.value:g} tokens, is above every prompt (at most "
                f"{longest} tokens): everything is recomputed, nothing is read back.",
                "Set kv_transfer.recompute_threshold to the length below which recomputing is "
                "faster (default 64), then `pdctl up SPEC`.",
            )
            continue
        outcomes = (
            {
                outcome.value: leg.metrics.value(
                    telemetry.ENGINE_DECISIONS.name, outcome=outcome.value
                )
                or 0
                for outcome in contract.Outcome
            }
            if leg.metrics
            else {}
        )
        below = outcomes.get(contract.Outcome.BELOW_THRESHOLD.value, 0)
        if below >= RARE_HITS and not outcomes[contract.Outcome.HIT.value]:
            assert leg.metrics is not None
            name = telemetry.ENGINE_DECISIONS.name
            yield Finding(
                leg.name,
                "likely",
                (found.excerpt, leg.metrics.excerpt(name, outcome="below_threshold")),
                f"All {below:g} prompts with a handle were below the recompute threshold of "
                f"{found.value:g} tokens: nothing is read back.",
                "Lower kv_transfer.recompute_threshold (default 64) below the usual history of a "
                "conversation, then `pdctl up SPEC`.",
            )


CHECKS = (
    Check(
        code="PD3060",
        title="Bidirectional transfer is on at some legs only",
        category=Category.CONFIG_MISMATCH,
        severity="error",
        playbook="bidirectional-on-one-side",
        needs=("settings|log|config|metrics",),
        patterns=PATTERNS,
        run=_one_sided,
        explains=("PD3061", "PD4562", "PD5560", "PD6060", "PD4563"),
    ),
    Check(
        code="PD3061",
        title="A leg runs with other settings than the spec's",
        category=Category.CONFIG_MISMATCH,
        severity="warning",
        playbook="not-the-settings-of-the-spec",
        needs=("spec", "settings|log|config|metrics"),
        patterns=PATTERNS,
        run=_not_the_specs,
        explains=("PD4562", "PD4563"),
    ),
    Check(
        code="PD3062",
        title="The legs' engine settings differ",
        category=Category.CONFIG_MISMATCH,
        severity="error",
        playbook="legs-set-differently",
        needs=("config",),
        run=_legs_differ,
    ),
    Check(
        code="PD4060",
        title="Decode's TTL is too short to read anything back",
        category=Category.KV_EXPIRY,
        severity="error",
        playbook="decode-ttl-too-short",
        needs=("settings|log|config|metrics",),
        patterns=PATTERNS,
        run=_ttl_unreadable,
        explains=("PD3061", "PD4061", "PD4562", "PD4563"),
        cheap=True,
    ),
    Check(
        code="PD4061",
        title="The router keeps handles longer than decode keeps blocks",
        category=Category.KV_EXPIRY,
        severity="error",
        playbook="router-ttl-above-decode-ttl",
        needs=("settings|log|config|metrics",),
        patterns=PATTERNS,
        run=_router_ttl,
        explains=("PD4562", "PD4563"),
    ),
    Check(
        code="PD4560",
        title="The recompute threshold is above every prompt",
        category=Category.SILENT_RECOMPUTE,
        severity="error",
        playbook="threshold-above-every-prompt",
        needs=("settings|log|config|metrics",),
        patterns=PATTERNS,
        run=_threshold,
        explains=("PD3061", "PD4562", "PD4563"),
        cheap=True,
    ),
)
