"""Whether handles come back, are kept and are used, as router and engines count it."""

from collections.abc import Iterator

from pd_connector import contract, telemetry
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.legs import (
    PATTERNS,
    STREAM_ACTIVE,
    STREAM_INACTIVE,
    Setting,
    health,
    setting,
)
from pdctl.doctor.model import Answer, Category, Check, Finding, More, Pattern, Unknown

ENOUGH_TURNS = 3
"""Turns that the router has seen before their outcome says anything."""

STARTED = Pattern(
    "vllm-api-server-started",
    ("Starting vLLM API server", "Starting vLLM server", "Application startup complete"),
)

PROBE = "probe.txt"
"""The captured probe turns: one JSON object with ``turns``."""


def _turns(leg: LegEvidence, **labels: str) -> float | None:
    return leg.metrics.value(telemetry.ROUTER_TURNS.name, **labels) if leg.metrics else None


def _on(leg: LegEvidence) -> Setting | None:
    found = setting(leg, "bidirectional")
    return found if found is not None and found.value is True else None


def _no_handles_in_streams(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.role("decode"):
        if not leg.has("log") or _on(leg) is None:
            continue
        refused = leg.hits.get(STREAM_INACTIVE.name)
        if refused:
            yield Finding(
                leg.name,
                "certain",
                refused.excerpts,
                "Streamed answers of this decode leg carry no kv_transfer_params: pdctl's plugin "
                f"left vLLM as it is ({refused.value('reason') or 'no reason given'}).",
                _STREAM_FIX,
            )
            continue
        answer = health(leg)
        healthy = answer is not None and answer.status == 200
        if healthy and STREAM_ACTIVE.name not in leg.hits and _start_in_log(leg):
            plugins = leg.variable("VLLM_PLUGINS")
            filtered = plugins is not None and "pd_connector" not in plugins.split(",")
            why = (
                f"VLLM_PLUGINS={plugins} keeps it out"
                if filtered
                else "it is not installed beside vLLM"
            )
            stored = _stored(evidence)
            yield Finding(
                leg.name,
                "certain" if filtered or stored == 0 else "likely",
                leg.hits[STARTED.name].excerpts,
                "Streamed answers of this decode leg carry no kv_transfer_params: pdctl's plugin "
                f"is not at work ({why}), and vLLM itself does not put them there. Every streamed "
                "turn is a MISS.",
                _STREAM_FIX,
            )


_STREAM_FIX = (
    "Install the pdctl package in the Python environment of every leg, keep pd_connector in "
    "VLLM_PLUGINS if that is set, use a vLLM that it supports; restart the leg and look for "
    f'"{contract.LOG_STREAM_ACTIVE}" in its log.'
)


def _start_in_log(leg: LegEvidence) -> bool:
    """Whether the log reaches back to the start, where the plugin speaks up."""
    return STARTED.name in leg.hits


def _stored(evidence: Evidence) -> float | None:
    for leg in evidence.role("router"):
        if leg.metrics and (_turns(leg) or 0) >= ENOUGH_TURNS:
            return leg.metrics.value(telemetry.ROUTER_HANDLES_STORED.name)
    return None


def _no_conversation(evidence: Evidence) -> Iterator[Answer]:
    decode = evidence.role("decode")
    if not any(map(_on, decode)):
        return
    for leg in evidence.role("router"):
        turns = _turns(leg) or 0
        if leg.metrics is None or turns < ENOUGH_TURNS or _stored(evidence) != 0:
            continue
        speaks = any(STREAM_ACTIVE.name in each.hits for each in decode)
        yield Finding(
            leg.name,
            "likely" if speaks else "possible",
            (
                leg.metrics.excerpt(telemetry.ROUTER_TURNS.name),
                leg.metrics.excerpt(telemetry.ROUTER_HANDLES_STORED.name),
            ),
            f"{turns:g} turns went through the router and not one handle was kept: the requests "
            "name no conversation, so no turn can continue another.",
            "Send conversation_id in the body, or one of the headers "
            f"{', '.join(contract.CONVERSATION_HEADERS)} (vLLM's benchmark client: "
            "--send-conversation-id); list another header in router.conversation_headers.",
        )


def _no_reuse(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.role("router"):
        if leg.metrics is None:
            continue
        sent = leg.metrics.value(telemetry.ROUTER_HANDLES_SENT.name) or 0
        hits = sum(
            _turns(leg, outcome=outcome.value) or 0
            for outcome in (contract.Outcome.HIT, contract.Outcome.LOCAL_HIT)
        )
        if sent >= ENOUGH_TURNS and not hits:
            seen = {
                outcome.value: count
                for outcome in contract.Outcome
                if (count := _turns(leg, outcome=outcome.value))
            }
            most = max(seen, key=lambda name: seen[name]) if seen else "none"
            yield Finding(
                leg.name,
                "possible",
                (
                    leg.metrics.excerpt(telemetry.ROUTER_HANDLES_SENT.name),
                    *(leg.metrics.excerpt(telemetry.ROUTER_TURNS.name, outcome=o) for o in seen),
                ),
                f"{sent:g} handles were sent to prefill and nothing was read back; the most "
                f"frequent outcome is {most}.",
                "Run `pdctl doctor SPEC --probe`, and look at prefill's log for the reason.",
            )


def _probe(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.role("router"):
        capture = next((each for each in leg.http if each.source.endswith(f"/{PROBE}")), None)
        if capture is None:
            yield Unknown("no probe turns were held", "pdctl doctor SPEC --probe")
            continue
        found = next(iter(capture.objects()), {})
        turns = found.get("turns", [])
        if found.get("error"):
            yield Finding(
                leg.name,
                "certain",
                (capture.excerpt,),
                f"A probe turn failed: {found['error']}.",
                "Look at the router's and the legs' logs at that moment: `pdctl logs "
                "DEPLOYMENT LEG`.",
            )
        elif turns and found.get("bidirectional") and not turns[-1].get("tokens_read"):
            yield Finding(
                leg.name,
                "certain",
                (capture.excerpt,),
                "Of two probe turns of one conversation the second read nothing back; its outcome "
                f"was {turns[-1].get('outcome')}.",
                "Look at what else is found; `pdctl verify SPEC` shows every turn.",
            )


CHECKS = (
    Check(
        code="PD4563",
        title="A probe turn is not reused",
        category=Category.SILENT_RECOMPUTE,
        severity="error",
        playbook="probe-turn-not-reused",
        needs=("http",),
        run=_probe,
    ),
)

MORE = (
    More(
        "PD6003",
        _no_handles_in_streams,
        ("log",),
        (*PATTERNS, STARTED),
        ("PD5501", "PD4511", "PD4563"),
    ),
    More("PD5501", _no_conversation, ("metrics",), PATTERNS, ("PD4511", "PD4563")),
    More("PD4511", _no_reuse, ("metrics",), (), ("PD4563",)),
)
