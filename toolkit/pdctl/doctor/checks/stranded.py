"""Blocks of prefill that decode will not report as read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.leaks import LOAD_LINE, RUNNING, USAGE, WAITING, _usage, idle_usage
from pdctl.doctor.checks.lines import EXPIRED_RELEASE, OUT_OF_MEMORY_KILL, UNRECOGNISED_READ
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

REJECTED = Pattern(
    "request-refused",
    ("400 Bad Request", "422 Unprocessable", "404 Not Found"),
    r"POST /v1/\S+ HTTP/[\d.]+\" (?:400|404|422)",
)
GONE = Pattern(
    "client-gone",
    ("isconnect", '" 499', "context canceled", "ClientDisconnect"),
    r"(?i)client (?:\w+ )?(?:disconnected|closed|gone|went away)|\" 499\b"
    r"|context canceled|ClientDisconnect",
)
RELEASE_CRASH = Pattern(
    "release-crash",
    ("update_from_kv_xfer_finished",),
)
PEER_DOWN = Pattern(
    "decode-down",
    (
        "connect error",
        "onnection refused",
        "ConnectError",
        "no healthy upstream",
        "OOMKilled",
        "CrashLoopBackOff",
        "EngineDeadError",
    ),
    r"(?i)(?:decode\S*.{0,400}"
    r"(?:connect\w* ?error|connection refused|unreachable|no healthy|OOMKilled|"
    r"CrashLoop|Error\s))|(?:connect\w* ?error|refused|no healthy upstream).{0,400}decode",
)

_SEVERAL = re.compile(r'"(?:n|best_of)"\s*:\s*(?:[2-9]|[1-9]\d+)\b')


def _several_answers(evidence: Evidence) -> Iterator[Answer]:
    several = [
        capture for leg in evidence.legs for capture in leg.http if _SEVERAL.search(capture.text)
    ]
    read, released = seen(evidence, UNRECOGNISED_READ), seen(evidence, EXPIRED_RELEASE, "prefill")
    if several and (read or released):
        yield Finding(
            read.leg if read else released.leg,
            "likely",
            (several[0].excerpt, *(read or released).excerpts[:2]),
            "Requests for several answers (n or best_of above 1) fan out on decode: it reports "
            "several reads of one prefill request, so prefill's blocks stay until the lease ends "
            "or the count does not fit.",
            "Refuse n above 1 at the P/D router or send such requests to decode alone (pd-router "
            "does).",
            severity="warning",
        )


def _dead_reader(evidence: Evidence) -> Iterator[Answer]:
    down = seen(evidence, PEER_DOWN)
    killed = seen(evidence, OUT_OF_MEMORY_KILL, "decode", "deployment")
    router = [
        leg.metrics.excerpt("pd_router_leg_up", role="decode")
        for leg in evidence.role("router")
        if leg.metrics and leg.metrics.value("pd_router_leg_up", role="decode") == 0
    ]
    for leg in evidence.role("prefill"):
        usage = _usage(leg)
        metrics = leg.metrics
        if not usage and (down or killed) and (line := _full_and_waiting(leg)):
            yield _held(leg.name, (line, *(down.excerpts[:1] or killed.excerpts[:1])))
            continue
        if not usage or usage[-1] < 0.85 or not metrics or not (down or killed or router):
            continue
        if (metrics.value(RUNNING) or 0) > 2 or not metrics.value(WAITING):
            continue
        yield _held(
            leg.name,
            (
                metrics.excerpt(USAGE),
                metrics.excerpt(WAITING),
                *(down.excerpts[:1] or killed.excerpts[:1]),
                *router[:1],
            ),
        )


def _held(leg: str, shown: tuple[Excerpt, ...]) -> Finding:
    return Finding(
        leg,
        "likely",
        shown,
        "Decode died, and prefill keeps the blocks of everything decode had not read until "
        "their time is over: it does not know that the reader is gone, and admits nothing "
        "meanwhile (480 s before vLLM had leases, 30 s with them).",
        "Upgrade to a vLLM with leases and heartbeats (kv_lease_duration). On an older one "
        "restart prefill after a decode crash, or lower VLLM_NIXL_ABORT_REQUEST_TIMEOUT. Find "
        "out why decode died.",
    )


def _full_and_waiting(leg: LegEvidence) -> Excerpt | None:
    """The last statistics line of a leg that is full, runs next to nothing and lets all wait."""
    hits = leg.hits.get(LOAD_LINE.name)
    for hit in hits.last[-1:] if hits else ():
        load = {name: float(hit.groups[name]) for name in ("running", "waiting", "usage")}
        if load["running"] <= 2 and load["waiting"] > 0 and load["usage"] >= 85:
            return hit.excerpt
    return None


def _stranded(evidence: Evidence) -> Iterator[Answer]:
    """Prefill's blocks that decode will never report as read."""
    released = seen(evidence, EXPIRED_RELEASE, "prefill")
    unread = set(released.counts("request"))
    rejected = seen(evidence, REJECTED, "decode")
    if len(unread) >= 3 and rejected.count >= 3:
        yield Finding(
            released.leg,
            "likely",
            (*rejected.excerpts[:1], *released.excerpts[:2]),
            "Decode refuses requests before it admits them (a wrong parameter, template or model "
            "name), so it never reads their KV and never tells prefill: prefill keeps the blocks "
            "until their time is over.",
            "Validate requests before prefill (the router must send the same checks to both legs "
            "first), and keep the lease short (kv_lease_duration 30).",
        )
        return
    gone = seen(evidence, GONE, "router", DEPLOYMENT, "client")
    if unread and gone:
        yield Finding(
            released.leg,
            "likely",
            (*gone.excerpts[:1], *released.excerpts[:2]),
            "Clients went away after prefill had answered and before decode took the request: "
            "decode never hears of it, so nobody tells prefill that its blocks can go, and they "
            "stay until the lease ends.",
            "Keep the lease short (kv_lease_duration 30), and let the router send decode's request "
            "even when the client has gone, or send nothing to prefill that it cannot follow up.",
            severity="warning" if len(unread) >= 3 or gone.count >= 3 else "info",
        )
        return
    read = seen(evidence, UNRECOGNISED_READ, "prefill")
    strangers = set(read.counts("request")) - unread
    if renamed := _renamed(strangers, unread):
        yield Finding(
            released.leg,
            "certain",
            (*read.excerpts[:1], *released.excerpts[:1]),
            f"Decode reports its reads under other ids than prefill gave out ({renamed[0]} for "
            f"{renamed[1]}): prefill does not know them, so every block that decode has read stays "
            "until its time is over, and prefill fills up while it has nothing to do.",
            "Upgrade vLLM on both legs (reports of MLA models with unequal tensor parallel sizes "
            "and of routers that rename requests), or give both roles the same "
            "--tensor-parallel-size; let the router pass X-Request-Id on unchanged.",
        )
        return
    for leg in evidence.role("prefill"):
        idle = idle_usage(leg)
        if strangers and leg.name in read.legs and idle and idle >= 0.05 and leg.metrics:
            yield Finding(
                leg.name,
                "likely",
                (*read.excerpts[:2], leg.metrics.excerpt(USAGE)),
                "Decode reports reads under ids that prefill does not know (its own instead of "
                "prefill's, seen with MLA models and unequal tensor parallel sizes), so the blocks "
                "of the real ids are never freed.",
                "Upgrade vLLM, or give both roles the same --tensor-parallel-size; restart prefill "
                "to get its blocks back.",
            )


def _crash_on_release(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, RELEASE_CRASH)
    if found:
        yield Finding(
            found.leg,
            "certain",
            found.excerpts,
            "The engine dies when it frees the blocks of a request that was aborted or had "
            "expired: the scheduler no longer knows it (a KeyError in old vLLM releases).",
            "Upgrade vLLM (0.11 or later); until then raise the time to live so that nothing "
            "expires, and restart the leg.",
        )


def _renamed(read: set[str], given: set[str]) -> tuple[str, str] | None:
    """An id that was read and one that was given out which differ in their last part alone."""
    by_base = {each.rpartition("-")[0]: each for each in given if "-" in each}
    for stranger in sorted(read):
        base = stranger.rpartition("-")[0]
        if len(base) >= 6 and re.search(r"\d", base) and base in by_base:
            return stranger, by_base[base]
    return None


CHECKS = (
    Check(
        "PD5003",
        "Several answers per prompt",
        Category.BLOCK_LEAK,
        "warning",
        "several-answers-per-prompt",
        _several_answers,
        needs=("http",),
        patterns=(UNRECOGNISED_READ, EXPIRED_RELEASE),
        explains=("PD4001", "PD4004"),
    ),
    Check(
        "PD5004",
        "Prefill holds blocks for a decode that is gone",
        Category.BLOCK_LEAK,
        "error",
        "reader-gone",
        _dead_reader,
        needs=("log|metrics",),
        patterns=(PEER_DOWN, OUT_OF_MEMORY_KILL, LOAD_LINE),
        explains=("PD4001", "PD5002", "PD8505", "PD7004"),
    ),
    Check(
        "PD5006",
        "Blocks that decode never reports as read",
        Category.BLOCK_LEAK,
        "error",
        "never-reported-read",
        _stranded,
        needs=("log",),
        patterns=(EXPIRED_RELEASE, UNRECOGNISED_READ, REJECTED, GONE),
        premises=("PD5003", "PD5004"),
        explains=("PD4001", "PD4004", "PD5005", "PD5002"),
    ),
    Check(
        "PD5008",
        "Freeing an aborted request ends the engine",
        Category.BLOCK_LEAK,
        "error",
        "release-ends-engine",
        _crash_on_release,
        needs=("log",),
        patterns=(RELEASE_CRASH,),
        explains=("PD4001", "PD5002", "PD8505"),
    ),
)
