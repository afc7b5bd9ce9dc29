"""Failures that metrics and status codes hide."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import LOAD_FAILURE_FAILS, LOAD_FAILURE_RECOVERED, TRANSFER_FAILURE
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, is_true, setting, settings
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Finding, Pattern

TELEMETRY_OFF = Pattern(
    "telemetry-off",
    (
        "when telemetry is not enabled",
        "NIXL_ERR_NO_TELEMETRY",
        "NoTelemetryError",
        "telemetry is disabled",
    ),
    r"(?P<failed>when telemetry is not enabled|NIXL_ERR_NO_TELEMETRY|NoTelemetryError)"
    r"|NIXL telemetry is disabled",
)
SKIPPED_POST = Pattern("skipped-post-processing", ("Skipping KV post-processing for failed",))
FULL_HIT = Pattern(
    "full-external-hit",
    ("hit tokens:",),
    r"Total tokens (?P<total>\d+), LMCache hit tokens: (?P<hit>\d+)",
)


def _telemetry(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, TELEMETRY_OFF)
    off = [e for e in settings(evidence, "telemetry") if is_true(e.value) is False]
    if not off and not found.values.get("failed"):
        return
    failed = [
        leg.metrics.excerpt("vllm:nixl_num_failed_transfers_total")
        for leg in evidence.engines
        if leg.metrics and leg.metrics.value("vllm:nixl_num_failed_transfers_total")
    ]
    yield Finding(
        off[0].leg if off else found.leg,
        "certain" if found else "likely",
        (*(each.excerpt for each in off[:1]), *found.excerpts[:2], *failed[:1])[:4],
        "NIXL's telemetry is off (NIXL_TELEMETRY_ENABLE), and vLLM asks for it after every "
        "finished transfer and takes the refusal for a failed one: KV arrives, every request is "
        "failed or computed again, and transfer metrics stay at zero.",
        "Unset NIXL_TELEMETRY_ENABLE or set it to y on every engine, and restart. Do not look for "
        "a fault in the fabric.",
    )


_LABELLED = re.compile(r'(?im)^\s*(?P<who>\w[\w /+-]{0,30}?)\s*:\s*"(?P<text>[^"]{3,})"')


def _other_text(evidence: Evidence) -> Iterator[Answer]:
    hits = seen(evidence, FULL_HIT)
    for leg in evidence.legs:
        for capture in leg.http:
            texts = {m["who"].lower(): m["text"] for m in _LABELLED.finditer(capture.text)}
            split = [t for who, t in texts.items() if re.search(r"^pd$|p/d|disagg|split|pair", who)]
            whole = [
                text
                for who, text in texts.items()
                if re.search(r"mono|single|\baggregat|direct|plain|alone|base", who)
            ]
            if not split or not whole or split[0][:200] == whole[0][:200]:
                continue
            yield Finding(
                leg.name,
                "likely",
                (capture.excerpt, *hits.excerpts[:1]),
                "The pair answers a prompt differently from one engine alone at temperature 0"
                + (", while the receiver reports a full hit" if hits else "")
                + ": KV landed in the wrong place or order. Nothing on the control path sees that.",
                "Stop using the transferred KV until it is equal: disable the connector or the "
                "cache layer, upgrade it, and keep a golden prompt (the pair against decode alone) "
                "in the deployment's checks: pdctl verify SPEC. First differences after many "
                "tokens in bfloat16 are numerics, at the first token they are not.",
            )
            return


def _failure_hidden(evidence: Evidence) -> Iterator[Answer]:
    """With policy fail every failed receive must fail a request; here none did."""
    policy = setting(evidence, "policy", "decode") or setting(evidence, "policy")
    failed, skipped = (
        seen(evidence, TRANSFER_FAILURE, "decode"),
        seen(evidence, SKIPPED_POST, "decode"),
    )
    handled = seen(evidence, LOAD_FAILURE_FAILS, "decode") or seen(
        evidence, LOAD_FAILURE_RECOVERED, "decode"
    )
    if failed and skipped and not handled and policy and str(policy.value) == "fail":
        yield Finding(
            failed.leg,
            "likely",
            (*failed.excerpts[:1], *skipped.excerpts[:1], policy.excerpt),
            "A receive failed and no request was failed or computed again although the policy is "
            "fail: this connector loses the failure (seen with hybrid models) and answers from "
            "blocks that were never filled, with HTTP 200.",
            "Do not trust the answers of these requests. Upgrade vLLM, or serve hybrid models "
            "without transfer until a golden prompt through the pair stays equal (pdctl verify "
            "SPEC). Alert on vllm:nixl_num_failed_transfers_total.",
        )


CHECKS = (
    Check(
        "PD7502",
        "Telemetry off fails finished transfers",
        Category.OBSERVABILITY,
        "error",
        "telemetry-off",
        _telemetry,
        needs=("log|env|config",),
        patterns=(TELEMETRY_OFF, *LOG_SETTINGS),
        explains=("PD2009", "PD6507", "PD4511", "PD2006"),
    ),
    Check(
        "PD7505",
        "Transferred KV gives other text",
        Category.OBSERVABILITY,
        "error",
        "other-text",
        _other_text,
        needs=("http",),
        patterns=(FULL_HIT,),
    ),
    Check(
        "PD7507",
        "A failed receive is answered all the same",
        Category.OBSERVABILITY,
        "error",
        "failed-receive-answered",
        _failure_hidden,
        needs=("log",),
        patterns=(
            TRANSFER_FAILURE,
            SKIPPED_POST,
            LOAD_FAILURE_FAILS,
            LOAD_FAILURE_RECOVERED,
            *LOG_SETTINGS,
        ),
        premises=("PD7502", "PD2001", "PD8501"),
        explains=("PD2009",),
    ),
)
