"""Figures that say something else than one believes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.expiry import EXPIRED
from pdctl.doctor.checks.lines import EXPIRED_RELEASE, KV_TRANSFER_METRICS, UNRECOGNISED_READ
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, is_true, number, setting
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding


def _routine_expiry(evidence: Evidence) -> Iterator[Answer]:
    released = seen(evidence, EXPIRED_RELEASE, "decode")
    counted = [
        leg.metrics.excerpt(EXPIRED)
        for leg in evidence.role("decode")
        if leg.metrics and (leg.metrics.value(EXPIRED) or 0) > 0
    ]
    bad = seen(evidence, UNRECOGNISED_READ)
    if not (released or counted) or bad:
        return
    yield Finding(
        released.leg if released else evidence.role("decode")[0].name,
        "likely",
        (*released.excerpts[:2], *counted[:1]),
        "Nothing is wrong: on a bidirectional decode no next turn comes to read the last turn of a "
        "conversation, so its blocks are released at the end of their TTL with this line, and the "
        "expired counter grows. The same on prefill means that decode did not read.",
        "Judge decode by its KV usage and by 'Potentially invalid KV blocks' lines. Let alerts on "
        "expired requests look at prefill only.",
    )


_PROMPT = re.compile(r'"prompt_tokens"\s*:\s*(\d+)')
_CACHED = re.compile(r'"cached_tokens"\s*:\s*(\d+)')


def _cached_tokens(evidence: Evidence) -> Iterator[Answer]:
    pairs: list[tuple[int, int, Excerpt]] = []
    for leg in evidence.legs:
        if leg.role == "prefill":
            continue
        for capture in leg.http:
            prompts, cached = _PROMPT.findall(capture.text), _CACHED.findall(capture.text)
            shown = Excerpt(capture.source, capture.text.strip()[:300])
            pairs += [(int(p), int(c), shown) for p, c in zip(prompts, cached, strict=False)]
    alike = [each for each in pairs if each[0] >= 64 and each[1] >= each[0] - 1]
    if alike and len(alike) >= 0.95 * len(pairs):
        yield Finding(
            alike[0][2].source.partition("/")[0],
            "likely",
            tuple(each[2] for each in alike[:2]),
            "cached_tokens is the whole prompt (or all but one token, or more than it) in every "
            "answer: decode counts the KV it got from prefill as cached, or counts it twice. It "
            "says nothing of reuse, not even for a first prompt.",
            "Take reuse from prefill: its vllm:prompt_tokens_by_source_total or the usage of its "
            "leg (pd-router's X-PD-Tokens-Read). Rewrite usage in the router if it is billed.",
            severity="warning",
        )


def _rate_of_one_rank(evidence: Evidence) -> Iterator[Answer]:
    tensor_parallel = setting(evidence, "tensor_parallel")
    ranks = number(tensor_parallel.value) if tensor_parallel else None
    for leg in evidence.engines:
        hits = leg.hits.get(KV_TRANSFER_METRICS.name)
        rates = [hit for hit in hits.last if int(hit.groups["transfers"])] if hits else []
        empty = [hit for hit in hits.last if not int(hit.groups["transfers"])] if hits else []
        if not hits or not rates or not (empty or (ranks and ranks > 1)):
            continue
        yield Finding(
            leg.name,
            "likely",
            (
                rates[-1].excerpt,
                *(hit.excerpt for hit in empty[:1]),
                *((tensor_parallel.excerpt,) if tensor_parallel else ()),
            ),
            "'Throughput (MB/s)' in 'KV Transfer metrics' is the sum of bytes over the sum of "
            "durations of all ranks: the rate of one rank, not of the leg, and overlap counts for "
            "nothing. A line of zeros means that the interval had failures only.",
            "Multiply by the tensor parallel size for an upper bound, or use "
            "rate(vllm:nixl_bytes_transferred_sum[1m]). After zeros read "
            "vllm:nixl_num_failed_transfers_total.",
        )


def _no_vllm(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.engines:
        if not leg.metrics:
            continue
        names = {name for scrape in leg.metrics.scrapes for name, _ in scrape}
        if len(names) > 5 and not any(
            n.startswith(("vllm:", "pd_engine", "ray_vllm", "sglang:")) for n in names
        ):
            yield Finding(
                leg.name,
                "certain",
                (Excerpt(leg.metrics.source, ", ".join(sorted(names)[:5])),),
                "What was scraped as the leg's /metrics is not an engine's.",
                "Point the scrape at the engine's HTTP port (pdctl status SPEC shows it).",
                severity="warning",
            )


def _counted_by_the_reader(evidence: Evidence) -> Iterator[Answer]:
    name = "vllm:nixl_xfer_time_seconds_count"
    reading = [leg for leg in evidence.role("decode") if leg.metrics and leg.metrics.value(name)]
    silent = [
        leg for leg in evidence.role("prefill") if leg.metrics and leg.metrics.value(name) == 0
    ]
    if reading and silent and silent[0].metrics and reading[0].metrics:
        yield Finding(
            silent[0].name,
            "likely",
            (silent[0].metrics.excerpt(name), reading[0].metrics.excerpt(name)),
            "Nothing is wrong: NIXL counts a transfer on the side that reads. Prefill counts "
            "readbacks only, decode what it pulls from prefill.",
            "Look at decode for P to D and at prefill for readback.",
        )


def _no_statistics(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.engines:
        if leg.config and is_true(leg.config.get("disable_log_stats", False)):
            yield Finding(
                leg.name,
                "certain",
                (Excerpt(f"{leg.name}/config.txt", "disable_log_stats"),),
                "The engine runs with --disable-log-stats: it has no statistics in its log and no "
                "useful metrics, so nothing shows whether KV is transferred.",
                "Leave --disable-log-stats out.",
                severity="warning",
            )


CHECKS = (
    Check(
        "PD7501",
        "Decode's expiry lines are routine",
        Category.OBSERVABILITY,
        "info",
        "decode-expiry-is-routine",
        _routine_expiry,
        needs=("log|metrics",),
        patterns=(EXPIRED_RELEASE, UNRECOGNISED_READ),
        premises=("PD4001", "PD4004"),
    ),
    Check(
        "PD7503",
        "cached_tokens counts transferred KV",
        Category.OBSERVABILITY,
        "warning",
        "cached-tokens-misleading",
        _cached_tokens,
        needs=("http",),
    ),
    Check(
        "PD7504",
        "The logged throughput is one rank's",
        Category.OBSERVABILITY,
        "info",
        "throughput-of-one-rank",
        _rate_of_one_rank,
        needs=("log",),
        patterns=(KV_TRANSFER_METRICS, *LOG_SETTINGS),
    ),
    Check(
        "PD7508",
        "Transfers are counted where they are read",
        Category.OBSERVABILITY,
        "info",
        "counted-by-the-reader",
        _counted_by_the_reader,
        needs=("metrics",),
        # Then prefill has read nothing for a reason.
        premises=(
            "PD3007",
            "PD4060",
            "PD4508",
            "PD4511",
            "PD5501",
            "PD6001",
            "PD6003",
            "PD8501",
        ),
    ),
    Check(
        "PD7509",
        "The engine's statistics are off",
        Category.OBSERVABILITY,
        "warning",
        "statistics-off",
        _no_statistics,
        needs=("config",),
    ),
    Check(
        "PD7506",
        "The scraped metrics are not an engine's",
        Category.OBSERVABILITY,
        "warning",
        "metrics-not-an-engine",
        _no_vllm,
        needs=("metrics",),
    ),
)
