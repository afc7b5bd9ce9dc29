"""Connections that break after the handshake, and transfers that fail."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.lifecycle import restarted_peer
from pdctl.doctor.checks.lines import (
    AGENT_UNKNOWN,
    LOAD_FAILURE_RECOVERED,
    REMOTE_DISCONNECT,
    TRANSFER_FAILURE,
)
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.evidence.metrics import Metrics
from pdctl.doctor.model import Answer, Category, Check, Finding


def _broken_connection(evidence: Evidence) -> Iterator[Answer]:
    broken, unknown = seen(evidence, REMOTE_DISCONNECT), seen(evidence, AGENT_UNKNOWN)
    if not broken or restarted_peer(evidence):
        return
    later = f" It shows as {unknown.count} later 'not found' errors." if unknown else ""
    yield Finding(
        broken.leg,
        "likely",
        (*broken.excerpts[:2], *unknown.excerpts[:1]),
        "The connection to a peer broke (its queue pair was torn down or reset), NIXL dropped the "
        "peer's agent, and the engine never shakes hands again: every later transfer to that peer "
        f"fails.{later} The first error names the cause, the many after it do not.",
        "Restart the leg that reports it, or both of the pair (pdctl down, pdctl up): that makes "
        "a new handshake. On EFA use backends: [LIBFABRIC] instead of UCX's SRD. Alert on the "
        "first line.",
    )


def _failures(metrics: Metrics) -> float:
    """Failed transfers between the scrapes, or of all time when hardly any succeeded."""
    name = "vllm:nixl_num_failed_transfers_total"
    gain, total = metrics.gain(name), metrics.value(name) or 0
    if gain is not None:
        return gain
    done = metrics.value("vllm:nixl_xfer_time_seconds_count")
    return total if done is not None and total > 0.1 * done else 0


def _unnamed_failures(evidence: Evidence) -> Iterator[Answer]:
    failed = seen(evidence, TRANSFER_FAILURE)
    recovered = seen(evidence, LOAD_FAILURE_RECOVERED)
    counted = [
        (leg, gain) for leg in evidence.engines if leg.metrics and (gain := _failures(leg.metrics))
    ]
    if failed.count < 3 and not (failed and not recovered) and not any(g >= 3 for _, g in counted):
        return
    shown = list(failed.excerpts)
    for leg, _ in counted:
        if leg.metrics:
            shown.append(leg.metrics.excerpt("vllm:nixl_num_failed_transfers_total"))
    kinds = ", ".join(sorted(failed.counts("type"))) or "transfers"
    yield Finding(
        failed.leg if failed else counted[0][0].name,
        "possible",
        tuple(shown[:4]),
        f"NIXL transfers fail ({kinds}); the evidence does not name the cause.",
        "Read the first failure in the log and the lines of UCX or libfabric above it; start the "
        "legs once with NIXL_LOG_LEVEL=INFO and UCX_LOG_LEVEL=info. Collect again: pdctl collect.",
    )


CHECKS = (
    Check(
        "PD2006",
        "The connection to a peer broke and stays broken",
        Category.NIXL_HANDSHAKE,
        "error",
        "connection-broken",
        _broken_connection,
        needs=("log|commands",),
        patterns=(REMOTE_DISCONNECT, AGENT_UNKNOWN),
        explains=("PD1015", "PD2009", "PD4511", "PD6507"),
    ),
    Check(
        "PD2009",
        "NIXL transfers fail",
        Category.NIXL_HANDSHAKE,
        "error",
        "transfers-fail",
        _unnamed_failures,
        needs=("log|metrics",),
        patterns=(TRANSFER_FAILURE, LOAD_FAILURE_RECOVERED),
        explains=("PD6507",),
    ),
)
