"""KV blocks that nobody gives back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import EXPIRED_RELEASE, OUT_OF_MEMORY_KILL, UNRECOGNISED_READ
from pdctl.doctor.checks.reading import LOG_SETTINGS, is_true, seen, setting
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

PUSH_TIMEOUT = Pattern(
    "push-registration-timeout",
    ("without a push completion", "NixlPushConnector: registration"),
    r"registration for request (?P<request>\S+) timed out",
)
WAITING_FOR_REMOTE = Pattern(
    "waiting-for-remote-kv",
    ("still in WAITING_FOR_REMOTE_KVS", "KVPoll.WaitingForInput"),
    r"(?P<request>\S+) is still in WAITING_FOR_REMOTE_KVS"
    r"|(?P<gave_up>timed out after .* in KVPoll\.WaitingForInput)",
)
REJECTED = Pattern(
    "request-refused",
    ("400 Bad Request", "422 Unprocessable", "404 Not Found"),
    r"POST /v1/\S+ HTTP/[\d.]+\" (?:400|404|422)",
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
    r"(?i)(?:decode\S*.*(?:connect\w* ?error|connection refused|unreachable|no healthy|OOMKilled|"
    r"CrashLoop|Error\s))|(?:connect\w* ?error|refused|no healthy upstream).*decode",
)

USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
DEFERRED = "vllm:num_requests_waiting_by_reason"


def _usage(leg: LegEvidence) -> list[float]:
    """KV cache usage of every scrape, 0 to 1."""
    if not leg.metrics:
        return []
    names = (USAGE, "vllm:gpu_cache_usage_perc", "sglang:token_usage")
    return next((values for name in names if (values := leg.metrics.series(name))), [])


def idle_usage(leg: LegEvidence) -> float | None:
    """The least KV cache usage of a leg that had nothing to do in at least two scrapes."""
    values = _usage(leg)
    if not leg.metrics or len(values) < 2:
        return None
    busy = leg.metrics.series(RUNNING) + leg.metrics.series(WAITING)
    if not busy or any(busy) or values[-1] < values[0] - 0.005:
        return None
    return min(values)


def _push(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, PUSH_TIMEOUT)
    if not found:
        return
    leg = next((each for each in evidence.legs if each.name == found.leg), None)
    idle = idle_usage(leg) if leg else None
    metric = (leg.metrics.excerpt(USAGE),) if leg and leg.metrics and idle else ()
    yield Finding(
        found.leg,
        "certain" if idle else "likely",
        (*found.excerpts[:2], *metric),
        "With the push connector, a request that is aborted while it waits for its KV keeps its "
        "blocks until prefill reports completion; when prefill gave up too, that never comes. The "
        "watchdog forgets the request and frees nothing.",
        "Restart decode when its idle KV usage does not go back to 0; use the pull connector "
        "where clients disconnect often.",
    )


def burst(evidence: Evidence) -> tuple[int, tuple[Excerpt, ...], str] | None:
    """Most requests whose blocks were released in one second on prefill."""
    found = seen(evidence, EXPIRED_RELEASE, "prefill")
    moments = found.values.get("when")
    if not moments:
        return None
    ranks = max(found.values["request"].values(), default=1)
    return moments.most_common(1)[0][1] // ranks, found.excerpts, found.leg


def _blocked_reaper(evidence: Evidence) -> Iterator[Answer]:
    found = burst(evidence)
    if not found or found[0] < 3:
        return
    unread = seen(evidence, UNRECOGNISED_READ, "prefill")
    leg = next((each for each in evidence.legs if each.name == found[2]), None)
    full = max(_usage(leg), default=0.0) if leg else 0.0
    if unread and full < 0.8:
        return
    metric = (leg.metrics.excerpt(USAGE),) if leg and leg.metrics and full else ()
    yield Finding(
        found[2],
        "likely" if full >= 0.8 else "possible",
        (*found[1], *metric)[:4],
        f"{found[0]} leases were released in the same second although the requests ended at "
        "different times: the reaper stops at the first lease that is not over, and one request "
        "whose decode keeps sending heartbeats holds back all that expired behind it.",
        "Keep decode's queue short, so that no request waits for minutes at the head; upgrade "
        "vLLM when its reaper no longer depends on the order.",
        severity="error" if full >= 0.8 else "warning",
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
        if not usage or usage[-1] < 0.85 or not metrics or not (down or killed or router):
            continue
        if (metrics.value(RUNNING) or 0) > 2 or not metrics.value(WAITING):
            continue
        yield Finding(
            leg.name,
            "likely",
            (
                metrics.excerpt(USAGE),
                metrics.excerpt(WAITING),
                *(down.excerpts[:1] or killed.excerpts[:1]),
                *router[:1],
            ),
            "Decode died, and prefill keeps the blocks of everything decode had not read until "
            "their time is over: it does not know that the reader is gone, and admits nothing "
            "meanwhile (480 s before vLLM had leases, 30 s with them).",
            "Upgrade to a vLLM with leases and heartbeats (kv_lease_duration). On an older one "
            "restart prefill after a decode crash, or lower VLLM_NIXL_ABORT_REQUEST_TIMEOUT. Find "
            "out why decode died.",
        )


def _idle_but_full(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.engines:
        idle = idle_usage(leg)
        if idle is None or idle < 0.05 or not leg.metrics:
            continue
        pins = leg.metrics.value("pd_engine_pinned_blocks")
        two_way = setting(evidence, "bidirectional", "decode")
        kept = leg.role == "decode" and two_way is not None and is_true(two_way.value) is True
        if pins or (kept and len(_usage(leg)) < 3):
            continue
        yield Finding(
            leg.name,
            "possible" if kept else "likely",
            (
                leg.metrics.excerpt(USAGE),
                leg.metrics.excerpt(RUNNING),
                leg.metrics.excerpt(WAITING),
            ),
            f"{idle:.0%} of the KV cache stays in use while the leg has nothing to do: requests "
            "were aborted or refused at the wrong moment and nobody frees their blocks.",
            "Wait as long as the longest lease or TTL (decode_ttl on a bidirectional decode), then "
            "look again: pdctl doctor SPEC --watch. If it stays, restart the leg.",
        )


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
    read = seen(evidence, UNRECOGNISED_READ, "prefill")
    strangers = set(read.counts("request")) - unread
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


def _waits_for_ever(evidence: Evidence) -> Iterator[Answer]:
    waiting = seen(evidence, WAITING_FOR_REMOTE)
    most = max(waiting.values.get("request", {"": 0}).values(), default=0)
    if most >= 3 or waiting.values.get("gave_up"):
        yield _stuck(waiting.leg, "likely", waiting.excerpts)
        return
    for leg in evidence.engines:
        if not leg.metrics:
            continue
        deferred = leg.metrics.series(DEFERRED, reason="deferred")
        running = leg.metrics.series(RUNNING)
        if len(deferred) > 1 and min(deferred) > 0 and not any(running):
            yield _stuck(leg.name, "likely", (leg.metrics.excerpt(DEFERRED, reason="deferred"),))


def _stuck(leg: str, confidence: str, excerpts: tuple[Excerpt, ...]) -> Finding:
    return Finding(
        leg,
        "likely" if confidence == "likely" else "possible",
        excerpts,
        "Requests wait for KV of a peer that never comes, and keep their blocks. On prefill: a "
        "handle given to a leg with bidirectional off, or a failed readback with stock's policy "
        "recompute. On decode: prefill's answer named a transfer that the peer does not make.",
        "Use pdctl's connector (kv_transfer.connector: pdctl), which turns a failed readback into "
        "an ordinary prefill; with stock use kv_load_failure_policy fail and retry without the "
        "handle. Set bidirectional alike on both legs. Restart the leg to free the blocks.",
    )


CHECKS = (
    Check(
        "PD5001",
        "Aborted pushes keep decode's blocks",
        Category.BLOCK_LEAK,
        "error",
        "aborted-push-leaks",
        _push,
        needs=("log",),
        patterns=(PUSH_TIMEOUT,),
        explains=("PD5005",),
    ),
    Check(
        "PD5002",
        "One live lease holds back the expired ones",
        Category.BLOCK_LEAK,
        "error",
        "lease-reaper-blocked",
        _blocked_reaper,
        needs=("log",),
        patterns=(EXPIRED_RELEASE, UNRECOGNISED_READ),
    ),
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
        needs=("metrics",),
        patterns=(PEER_DOWN, OUT_OF_MEMORY_KILL),
        explains=("PD4001", "PD5002", "PD8505", "PD7004"),
    ),
    Check(
        "PD5005",
        "KV stays in use on an idle leg",
        Category.BLOCK_LEAK,
        "warning",
        "idle-but-full",
        _idle_but_full,
        needs=("metrics",),
        patterns=LOG_SETTINGS,
    ),
    Check(
        "PD5006",
        "Blocks that decode never reports as read",
        Category.BLOCK_LEAK,
        "error",
        "never-reported-read",
        _stranded,
        needs=("log",),
        patterns=(EXPIRED_RELEASE, UNRECOGNISED_READ, REJECTED),
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
    Check(
        "PD5007",
        "Requests wait for KV that never comes",
        Category.BLOCK_LEAK,
        "error",
        "waits-for-remote-kv",
        _waits_for_ever,
        needs=("log|metrics",),
        patterns=(WAITING_FOR_REMOTE,),
        explains=("PD2009", "PD5005"),
    ),
)
