"""What the legs are set to: against each other, the spec, the router and the laws of the engine."""

from collections.abc import Iterator
from typing import Any

from pd_connector import contract
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.legs import PATTERNS, Setting, setting
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, More

_SPEC_KEYS = {
    "bidirectional": "bidirectional",
    "threshold": "recompute_threshold",
    "decode_ttl": "decode_ttl",
}
_SAME = (
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


CHECKS = (
    Check(
        code="PD3061",
        title="A leg runs with other settings than the spec's",
        category=Category.CONFIG_MISMATCH,
        severity="warning",
        playbook="not-the-settings-of-the-spec",
        needs=("spec", "settings|log|config|metrics"),
        patterns=PATTERNS,
        run=_not_the_specs,
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
        explains=("PD3061", "PD4002", "PD4003", "PD4511", "PD4563"),
        cheap=True,
    ),
)

MORE = tuple(More(code, explains=("PD3061", "PD4563")) for code in ("PD3007", "PD4003", "PD4508"))
"""What these find is also a difference from the spec."""
