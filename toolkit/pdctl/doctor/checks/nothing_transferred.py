"""No token comes from the peer, as the metrics and statistics of the engines show it."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.recompute import BY_SOURCE
from pdctl.doctor.checks.settings import LOG_SETTINGS, is_true, setting
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.evidence.metrics import Metrics
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

STATISTICS = Pattern(
    "engine-statistics",
    ("External prefix cache hit rate",),
    r"Avg prompt throughput: (?P<prompt>\d+(?:\.\d+)?).{0,400}"
    r"Prefix cache hit rate: (?P<local>\d+(?:\.\d+)?)%.{0,400}"
    r"External prefix cache hit rate: (?P<external>\d+(?:\.\d+)?)%",
)


def _unmatched(metrics: Metrics) -> tuple[Excerpt, ...]:
    asked, found = (
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
    )
    moved = metrics.value("vllm:nixl_bytes_transferred_count")
    if (metrics.value(asked) or 0) > 10_000 and metrics.value(found) == 0 and not moved:
        return metrics.excerpt(found), metrics.excerpt(asked)
    return ()


def _no_external_hits(evidence: Evidence) -> Iterator[Answer]:
    """vLLM's own statistics lines of a decode leg that works on prompts."""
    for leg in evidence.role("decode"):
        hits = leg.hits.get(STATISTICS.name)
        busy = [
            hit
            for hit in (hits.last if hits else [])
            if float(hit.groups["prompt"]) > 100 and float(hit.groups["local"]) < 20
        ]
        if len(busy) >= 2 and all(float(hit.groups["external"]) == 0 for hit in busy):
            yield Finding(
                leg.name,
                "likely",
                tuple(hit.excerpt for hit in busy[-2:]),
                "Decode works on prompts and its external prefix cache hit rate stays at 0: it "
                "computes what prefill has computed.",
                "Follow one request: prefill's answer must hold kv_transfer_params and decode's "
                "request must carry them. pdctl verify SPEC proves it end to end.",
                severity="warning",
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
        elif unmatched := _unmatched(leg.metrics):
            yield Finding(
                leg.name,
                "likely",
                unmatched,
                "Decode asks its connector for every prompt and never finds anything: no token "
                "came from prefill.",
                "Follow one request: prefill's answer must hold kv_transfer_params and decode's "
                "request must carry them. pdctl verify SPEC proves it end to end.",
            )
    yield from _no_external_hits(evidence)
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
        "PD4511",
        "No token comes from the peer",
        Category.SILENT_RECOMPUTE,
        "error",
        "nothing-transferred",
        _nothing_transferred,
        needs=("metrics|log",),
        patterns=(STATISTICS, *LOG_SETTINGS),
    ),
)
