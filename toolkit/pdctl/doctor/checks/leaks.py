"""KV blocks that nobody gives back."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.lines import EXPIRED_RELEASE, UNRECOGNISED_READ
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, is_true, number, setting
from pdctl.doctor.evidence.facts import Evidence, Hit, LegEvidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

PUSH_TIMEOUT = Pattern(
    "push-registration-timeout",
    ("without a push completion", "NixlPushConnector: registration"),
    r"registration for request (?P<request>\S+) timed out",
)
WAITING_FOR_REMOTE = Pattern(
    "waiting-for-remote-kv",
    ("still in WAITING_FOR_REMOTE_KVS", "KVPoll.WaitingForInput"),
    r"\b(?P<request>\S{1,200}) is still in WAITING_FOR_REMOTE_KVS"
    r"|(?P<gave_up>timed out after .{0,400} in KVPoll\.WaitingForInput)",
    timed=True,
)
DEFERRED_LINE = Pattern(
    "deferred-requests",
    ("Deferred:",),
    r"Running: (?P<running>\d+) reqs.{0,400}Deferred: (?P<deferred>[1-9]\d*) reqs",
)
LOAD_LINE = Pattern(
    "engine-load",
    ("KV cache usage:",),
    r"Running: (?P<running>\d+) reqs.{0,60}?Waiting: (?P<waiting>\d+) reqs"
    r".{0,120}?KV cache usage: (?P<usage>\d+(?:\.\d+)?)%",
    timed=True,
    counted=False,
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


def _seconds(first: str | None, last: str | None) -> int:
    """Seconds between two times of day, over midnight if need be; 0 when one is not known."""
    if not first or not last:
        return 0
    start, end = (
        sum(int(part) * unit for part, unit in zip(each.split(":"), (3600, 60, 1), strict=True))
        for each in (first, last)
    )
    return (end - start) % 86_400


def _idle_lines(leg: LegEvidence) -> tuple[float, int, tuple[Excerpt, ...]] | None:
    """The least KV usage that the log shows at its end with nothing to do, and for how long."""
    hits = leg.hits.get(LOAD_LINE.name)
    idle: list[Hit] = []
    for hit in reversed(hits.last if hits else []):
        if hit.groups["running"] != "0" or hit.groups["waiting"] != "0":
            break
        idle.insert(0, hit)
    if len(idle) < 2:
        return None
    span = _seconds(idle[0].groups.get("when"), idle[-1].groups.get("when"))
    usages = [float(hit.groups["usage"]) / 100 for hit in idle]
    return min(usages), span, (idle[0].excerpt, idle[-1].excerpt)


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
    yield from _idle_in_log(evidence)


def _idle_in_log(evidence: Evidence) -> Iterator[Finding]:
    """KV that stays in use longer than decode's blocks may be kept, as the log shows it."""
    stated = setting(evidence, "decode_ttl", "decode")
    ttl = (number(stated.value) if stated else None) or 480
    for leg in evidence.engines:
        shown = _idle_lines(leg)
        if idle_usage(leg) is None and shown and shown[0] >= 0.05 and shown[1] > ttl:
            yield Finding(
                leg.name,
                "likely",
                shown[2],
                f"{shown[0]:.0%} of the KV cache stays in use for {shown[1]} s while the leg has "
                "nothing to do: requests were aborted or refused at the wrong moment and nobody "
                "frees their blocks.",
                "Restart the leg to get its blocks back. Look for aborted requests before the "
                "usage rose; pdctl doctor SPEC --watch shows whether it rises again.",
            )


def _waits_for_ever(evidence: Evidence) -> Iterator[Answer]:
    waiting = seen(evidence, WAITING_FOR_REMOTE)
    most = max(waiting.values.get("request", {"": 0}).values(), default=0)
    if most >= 3 or waiting.values.get("gave_up") or (most >= 2 and _long_wait(evidence)):
        yield _stuck(waiting.leg, "likely", waiting.excerpts)
        return
    for leg in evidence.engines:
        hits = leg.hits.get(DEFERRED_LINE.name)
        still = [hit for hit in (hits.last if hits else []) if hit.groups["running"] == "0"]
        if len(still) >= 3:
            yield _stuck(leg.name, "likely", tuple(hit.excerpt for hit in still[-2:]))
            continue
        if not leg.metrics:
            continue
        deferred = leg.metrics.series(DEFERRED, reason="deferred")
        running = leg.metrics.series(RUNNING)
        if len(deferred) > 1 and min(deferred) > 0 and not any(running):
            yield _stuck(leg.name, "likely", (leg.metrics.excerpt(DEFERRED, reason="deferred"),))


def _long_wait(evidence: Evidence) -> bool:
    """Whether a request is seen to wait for a minute."""
    for leg in evidence.engines:
        hits = leg.hits.get(WAITING_FOR_REMOTE.name)
        since: dict[str, str | None] = {}
        for hit in (*hits.first, *hits.last) if hits else ():
            name, when = hit.groups.get("request", ""), hit.groups.get("when")
            if 60 <= _seconds(since.setdefault(name, when), when) < 43_200:
                return True
    return False


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
        "PD5005",
        "KV stays in use on an idle leg",
        Category.BLOCK_LEAK,
        "warning",
        "idle-but-full",
        _idle_but_full,
        needs=("log|metrics",),
        patterns=(LOAD_LINE, *LOG_SETTINGS),
    ),
    Check(
        "PD5007",
        "Requests wait for KV that never comes",
        Category.BLOCK_LEAK,
        "error",
        "waits-for-remote-kv",
        _waits_for_ever,
        needs=("log|metrics",),
        patterns=(WAITING_FOR_REMOTE, DEFERRED_LINE),
        explains=("PD2009", "PD5005"),
    ),
)
