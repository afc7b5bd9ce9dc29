"""Blocks that are gone before they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.captures import answers, requests, streams
from pdctl.doctor.checks.lines import (
    DECLINED,
    EXPIRED_RELEASE,
    LOAD_FAILURE_FAILS,
    UNRECOGNISED_READ,
)
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, Setting, config_values, number, settings
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.evidence.metrics import Metrics
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding

EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
DECODE_TTL_SECONDS = 480
"""vLLM's default of decoder_kv_blocks_ttl."""


def _late_read(evidence: Evidence) -> Iterator[Answer]:
    released = seen(evidence, EXPIRED_RELEASE, "prefill")
    read = seen(evidence, UNRECOGNISED_READ, "prefill")
    served = set(released.counts("request")) & set(read.counts("request"))
    growing = [
        leg for leg in evidence.role("prefill") if leg.metrics and _many_expired(leg.metrics)
    ]
    waiting = any(
        (leg.metrics.value("vllm:num_requests_waiting") or 0) >= 5
        for leg in evidence.role("decode")
        if leg.metrics
    )
    unread = len(released.counts("request"))
    bursts = max(released.values.get("when", {"": 0}).values(), default=0)
    spread = unread >= 5 and bursts < unread
    once = any(each.metrics and each.metrics.gain(EXPIRED) is None for each in growing)
    proven = served or (growing and (waiting or unread or once)) or spread or (unread and waiting)
    if not proven and not unread:
        return
    leg = released.leg if released else growing[0].name
    lease = settings(evidence, "lease")
    metric = tuple(each.metrics.excerpt(EXPIRED) for each in growing[:1] if each.metrics)
    if served:
        cause = (
            "Prefill's lease on the blocks ended before decode read them, and decode read them "
            f"all the same ({len(served)} requests): it was answered from freed memory, HTTP 200."
        )
    elif not proven:
        cause = (
            "Decode did not read blocks before prefill's lease on them ended: decode queued the "
            "request for too long, or its client had gone. A few are routine."
        )
    else:
        cause = (
            "Prefill's lease on the blocks ends before decode reads them: decode queues requests "
            "longer than the lease (30 s by default, +20 s per heartbeat)."
        )
    yield Finding(
        leg,
        "certain" if served else "likely" if proven else "possible",
        (
            *released.excerpts[:1],
            *read.excerpts[:1],
            *metric,
            *(each.excerpt for each in lease[:1]),
        )[:4],
        cause,
        "Raise kv_connector_extra_config.kv_lease_duration on BOTH legs above the 99th percentile "
        "of the time between prefill's answer and decode's read, and shorten decode's queue "
        "(vllm:num_requests_waiting on decode: more decode legs, or fewer requests at once). Each "
        "tensor parallel rank logs its own line: divide counts by the ranks.",
        severity="error" if served else "warning" if proven else "info",
    )


def _many_expired(metrics: Metrics) -> bool:
    gain, total = metrics.gain(EXPIRED), metrics.value(EXPIRED) or 0
    if gain is not None:
        return gain >= 5
    served = metrics.value("vllm:request_success_total")
    return total >= 10 and (served is None or total > 0.01 * served)


def router_ttls(evidence: Evidence) -> list[Setting]:
    """How long the router keeps handles, in seconds."""
    found = []
    for leg in evidence.legs:
        for path, value in config_values(leg):
            words = path.lower()
            mine = leg.role == "router" or "router" in words or "proxy" in words
            seconds = number(value)
            if mine and re.search(r"ttl", words) and "decode" not in words and seconds:
                shown = Excerpt(f"{leg.name}/config.txt", f"{path}: {value}")
                found.append(Setting(leg.name, "router", seconds, shown))
        if leg.role == "router" and leg.metrics:
            name = "pd_router_handle_ttl_seconds"
            if (seconds := leg.metrics.value(name)) is not None:
                found.append(Setting(leg.name, "router", seconds, leg.metrics.excerpt(name)))
    return found


def _decode_ttl(evidence: Evidence) -> tuple[float, tuple[Excerpt, ...]]:
    stated = settings(evidence, "decode_ttl", "decode") or settings(evidence, "decode_ttl")
    for each in stated:
        if (seconds := number(each.value)) is not None:
            return seconds, (each.excerpt,)
    return DECODE_TTL_SECONDS, ()


def _too_long(evidence: Evidence) -> tuple[Setting, float, tuple[Excerpt, ...]] | None:
    seconds, shown = _decode_ttl(evidence)
    long = [each for each in router_ttls(evidence) if each.value >= seconds]
    return (long[0], seconds, shown) if long else None


def _next_turn_too_late(evidence: Evidence) -> Iterator[Answer]:
    declined, failing = seen(evidence, DECLINED), seen(evidence, LOAD_FAILURE_FAILS)
    counted: list[Excerpt] = []
    grown = 0.0
    leg = declined.leg
    for each in evidence.role("prefill", "router"):
        for name, labels in (
            ("pd_engine_declined_expired_reads_total", {}),
            ("pd_router_turns_total", {"outcome": "expired"}),
        ):
            gain = each.metrics.gain(name, **labels) if each.metrics else None
            if each.metrics and gain and gain >= 5:
                counted.append(each.metrics.excerpt(name, **labels))
                grown = max(grown, gain)
                leg = leg if declined else each.name
    if not declined and not counted:
        return
    long = _too_long(evidence)
    ttl, shown = _decode_ttl(evidence)
    router = (
        f" The router keeps handles {long[0].value:g} s, decode its blocks {ttl:g} s."
        if long
        else ""
    )
    often = declined.count >= 3 or bool(counted) or bool(failing) or bool(long)
    yield Finding(
        leg,
        "certain",
        (
            *declined.excerpts[:1],
            *failing.excerpts[:1],
            *counted[:1],
            *((long[0].excerpt,) if long else ()),
            *shown,
        )[:4],
        "The next turn comes after decode's blocks of the turn before have expired "
        f"(decoder_kv_blocks_ttl, {ttl:g} s, not renewed), so prefill declines the read."
        f"{router}"
        + (" With kv_load_failure_policy fail the client gets HTTP 500." if failing else ""),
        "Keep the router's TTL below decode's (450 s below 480 s), and raise decode_ttl above the "
        "pauses between turns as far as decode's memory allows (pdctl doctor SPEC --only "
        "memory-sizing). Forward kv_transfer_params untouched. With a stock connector, retry the "
        "prefill without the handle.",
        severity=None if often else "warning",
    )


def _router_ttl(evidence: Evidence) -> Iterator[Answer]:
    if long := _too_long(evidence):
        yield Finding(
            long[0].leg,
            "certain",
            (long[0].excerpt, *long[2]),
            f"The router keeps handles for {long[0].value:g} s, decode keeps the blocks for "
            f"{long[1]:g} s: at the end of that time it offers handles whose blocks are gone.",
            "Set the router's TTL below decode's (450 s below 480 s; pdctl spec: router.handle_ttl "
            "below kv_transfer.decode_ttl).",
        )


def _read_after_free(evidence: Evidence) -> Iterator[Answer]:
    read = seen(evidence, UNRECOGNISED_READ)
    if not read:
        return
    released = seen(evidence, EXPIRED_RELEASE)
    known = set(released.counts("request"))
    if set(read.counts("request")) <= known and "prefill" in read.leg:
        return
    decode = any(leg in {each.name for each in evidence.role("decode")} for leg in read.legs)
    yield Finding(
        read.leg,
        "likely",
        (*read.excerpts, *released.excerpts[:1])[:4],
        "Blocks were read after they had been freed: the reader got whatever lay there, with "
        "HTTP 200. "
        + (
            "On decode that is a handle used twice, or after its deadline: the first read frees "
            "the blocks."
            if decode
            else "The lease had ended, or the same request was read twice."
        ),
        "Use a handle once (claim it, restore it only if nothing was read), forward its deadline "
        "untouched, and keep the router's TTL below decode's. pd-router does all three.",
    )


def _deadline_lost(evidence: Evidence) -> Iterator[Answer]:
    deadline = re.compile(r'"remote_\w*expir\w*"\s*:\s*[\d.]+')
    given = [
        (leg, capture)
        for leg, capture in (*answers(evidence, "decode"), *streams(evidence, "decode"))
        if deadline.search(capture.text)
    ]
    sent = [
        (leg, capture)
        for leg, capture in requests(evidence, "prefill", "router", DEPLOYMENT)
        if "remote_block_ids" in capture.text
    ]
    sent += [
        (leg, capture)
        for leg in evidence.role("prefill")
        for capture in leg.http
        if re.search(r"\bPOST\b|max_tokens", capture.text)
        and re.search(r'"remote_block_ids"\s*:\s*\[+\s*\d', capture.text)
        and (leg, capture) not in sent
    ]
    lost = [(leg, capture) for leg, capture in sent if not deadline.search(capture.text)]
    if given and lost:
        yield Finding(
            lost[0][0].name,
            "certain",
            (
                Excerpt(given[0][1].source, given[0][1].text.strip()[:300]),
                Excerpt(lost[0][1].source, lost[0][1].text.strip()[:300]),
            ),
            "The router rebuilds kv_transfer_params and loses the deadline of decode's blocks: "
            "without it prefill reads whatever is in them, expired or not.",
            "Forward kv_transfer_params verbatim from decode's answer to the next prefill request.",
        )


CHECKS = (
    Check(
        "PD4001",
        "Prefill's lease ends before decode reads",
        Category.KV_EXPIRY,
        "error",
        "lease-ends-before-read",
        _late_read,
        needs=("log|metrics",),
        patterns=(EXPIRED_RELEASE, UNRECOGNISED_READ, *LOG_SETTINGS),
        premises=("PD5002", "PD5004", "PD5006"),
        explains=("PD4004",),
    ),
    Check(
        "PD4002",
        "The next turn comes after decode's blocks expired",
        Category.KV_EXPIRY,
        "error",
        "next-turn-too-late",
        _next_turn_too_late,
        needs=("log|metrics",),
        patterns=(DECLINED, LOAD_FAILURE_FAILS, *LOG_SETTINGS),
        explains=("PD4003", "PD4004", "PD4060", "PD6507", "PD2009"),
    ),
    Check(
        "PD4003",
        "The router keeps handles longer than decode keeps blocks",
        Category.KV_EXPIRY,
        "error",
        "router-ttl-too-long",
        _router_ttl,
        needs=("config|metrics",),
        patterns=LOG_SETTINGS,
    ),
    Check(
        "PD4004",
        "Blocks read after they were freed",
        Category.KV_EXPIRY,
        "error",
        "read-after-free",
        _read_after_free,
        needs=("log",),
        patterns=(UNRECOGNISED_READ, EXPIRED_RELEASE),
        premises=("PD4001", "PD5003", "PD5006"),
    ),
    Check(
        "PD4005",
        "The handle loses its deadline on the way",
        Category.KV_EXPIRY,
        "error",
        "deadline-lost",
        _deadline_lost,
        needs=("http",),
        explains=("PD4004",),
    ),
)
