"""Starts, stops and restarts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pdctl.doctor.checks.captures import answers, streams
from pdctl.doctor.checks.lines import (
    ADDRESS_IN_USE,
    AGENT_UNKNOWN,
    ENGINE_DEAD,
    OUT_OF_MEMORY_KILL,
    REMOTE_DISCONNECT,
    TRANSFER_FAILURE,
)
from pdctl.doctor.checks.reading import Seen, any_seen, seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, settings
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import (
    DEPLOYMENT,
    TIME_OF_DAY,
    Answer,
    Category,
    Check,
    Excerpt,
    Finding,
    More,
    Pattern,
)

STALE_QUEUE_PAIR = Pattern(
    "stale-queue-pair",
    ("mlx5dv_devx_obj_modify", "Remote I/O error", "ucp_ep_rkey_unpack", "rkey_unpack"),
    r"mlx5dv_devx_obj_modify\(.{0,400}\) failed|UCX\s+ERROR.{0,400}"
    r"Remote I/O error|ucp_ep_rkey_unpack",
)
SHUTDOWN = Pattern(
    "engine-shutdown",
    (
        "force killing remaining",
        "received SIGTERM",
        "Shutting down",
        "SIGTERM",
        "Stopping container",
        "Killing container",
    ),
    r"force killing remaining processes"
    r"|(?i:received (?:signal )?SIGTERM)|Shutting down|(?:Stopping|Killing) container",
    timed=True,
)
TOGETHER_SECONDS = 180
"""Log lines further apart than this have nothing to do with each other."""
NOT_READY = Pattern(
    "not-ready",
    ("Engine core initialization failed", "EngineCore failed to start", "Failed core proc"),
)

_RESTARTED_POD = re.compile(
    r"(?m)^(?P<name>\S*(?:prefill|decode)\S*)\s.{0,400}?\s(?P<count>[1-9]\d*)(?:\s+\([^)]*ago\))"
)


def restarted_peer(evidence: Evidence) -> tuple[Excerpt, ...]:
    """Evidence that a leg was restarted while its peer went on."""
    shown = [
        Excerpt(command.source, match[0].strip())
        for leg in evidence.legs
        for command in leg.commands
        if (match := _RESTARTED_POD.search(command.output))
    ]
    for leg in evidence.role("router"):
        if leg.metrics and (leg.metrics.gain("pd_router_leg_restarts_total") or 0) > 0:
            shown.append(leg.metrics.excerpt("pd_router_leg_restarts_total"))
    for leg in evidence.engines:
        starts = leg.metrics.series("process_start_time_seconds") if leg.metrics else []
        if len(set(starts)) > 1 and leg.metrics:
            shown.append(leg.metrics.excerpt("process_start_time_seconds"))
    return tuple(shown)


def _stale_agent(evidence: Evidence) -> Iterator[Answer]:
    stale = seen(evidence, STALE_QUEUE_PAIR)
    broken = any_seen(evidence, (REMOTE_DISCONNECT, AGENT_UNKNOWN, TRANSFER_FAILURE))
    restarted = restarted_peer(evidence)
    failed_answers = [
        Excerpt(capture.source, capture.text.strip()[:300])
        for _, capture in (*answers(evidence), *streams(evidence))
        if re.search(r'"finish_reason"\s*:\s*"error"', capture.text)
    ]
    if not stale and not (restarted and broken):
        return
    fixed = [
        each
        for each in settings(evidence, "engine_id")
        if not re.search(r"[{]|[0-9a-f]{6,}", str(each.value))
    ]
    yield Finding(
        stale.leg if stale else broken.leg,
        "likely" if stale or restarted else "possible",
        (
            *stale.excerpts[:1],
            *broken.excerpts[:1],
            *restarted[:1],
            *failed_answers[:1],
            *(each.excerpt for each in fixed[:1]),
        )[:4],
        "A peer was restarted at the same address and this leg still holds the agent of its dead "
        "predecessor: nothing invalidates it (engine_ttl, one hour, is only looked at when another "
        "new peer appears), so transfers fail although every leg is healthy."
        + (" The engine id is a literal, so the new process looks like the old." if fixed else ""),
        "Restart the legs that hold the old agent (pdctl down, pdctl up, or roll both sides). Use "
        "an engine id that is new at every start: leave engine_id out, or {nonce} in a pdctl "
        "spec. Watch for finish_reason 'error' in answers with status 200.",
    )


CRASH_IN_METADATA = Pattern(
    "crash-in-remote-metadata",
    ("loadRemoteMD", "loadRemoteConnInfo"),
    r"loadRemote(?:MD|ConnInfo)",
)
SEGFAULT = Pattern(
    "segfault",
    ("egfault encountered", "SIGSEGV", "egmentation fault"),
    r"(?i)segfault encountered|SIGSEGV|segmentation fault",
)


def _crash_in_metadata(evidence: Evidence) -> Iterator[Answer]:
    where, crash = seen(evidence, CRASH_IN_METADATA), seen(evidence, SEGFAULT)
    restarted = restarted_peer(evidence)
    if where and crash:
        yield Finding(
            crash.leg,
            "certain" if restarted else "likely",
            (*crash.excerpts[:1], *where.excerpts[:1], *restarted[:1]),
            "The engine crashed while it took in the metadata of a peer that was started anew: "
            "what it held of the peer's predecessor (agent, endpoints) is stale, and NIXL up to "
            "1.3 does not survive that.",
            "Upgrade NIXL with vLLM (the set that vLLM pins). Until then restart the peers of a "
            "leg with it (pdctl down, pdctl up), and take a leg out of the router before it is "
            "restarted.",
        )


def _together(first: Seen, second: Seen) -> bool:
    """Whether two symptoms came at about the same time of day, as far as lines tell it."""

    def seconds(found: Seen) -> list[int]:
        texts = found.counts("when")
        return [int(t[:2]) * 3600 + int(t[3:5]) * 60 + int(t[6:8]) for t in texts]

    ours, theirs = seconds(first), seconds(second)
    if not ours or not theirs:
        return True
    return any(abs(one - other) <= TOGETHER_SECONDS for one in ours for other in theirs)


def _stopped(evidence: Evidence, role: str) -> Seen:
    """Whether a leg of a role was stopped, by its own words or by the cluster's events."""
    if own := seen(evidence, SHUTDOWN, role):
        return own
    told = evidence.text(
        rf"\b{role}.{{0,200}}(?i:(?:stopping|killing) container|SIGKILL|SIGTERM)",
        "commands",
        roles=(DEPLOYMENT,),
    )
    before = (TIME_OF_DAY.search(each.match.string, 0, each.match.start()) for each in told)
    when = Counter(match[0] for match in before if match)
    excerpts = tuple(each.excerpt for each in told[:3])
    names = tuple(leg.name for leg in evidence.role(role)) or (DEPLOYMENT,)
    return Seen(len(told), excerpts, names if told else (), {"when": when} if when else {})


def _stopped_mid_read(evidence: Evidence) -> Iterator[Answer]:
    stopped = _stopped(evidence, "prefill")
    failed = seen(evidence, TRANSFER_FAILURE, "decode")
    reverse = (_stopped(evidence, "decode"), seen(evidence, TRANSFER_FAILURE, "prefill"))
    if not (stopped and failed):
        stopped, failed = reverse
    if not (stopped and failed and _together(stopped, failed)):
        return
    yield Finding(
        stopped.leg,
        "likely",
        (*stopped.excerpts[:2], *failed.excerpts[:2]),
        "The leg was stopped while its peer was still reading its KV: nothing waits for reads "
        "under way before the memory is unregistered.",
        "Take the leg out of the router first, wait until nothing reads from it (at least the "
        "lease, 30 s, and the queue; pd_engine_pinned_turns 0 on decode), then stop it. Set "
        "terminationGracePeriodSeconds to that.",
    )


def _port_taken(evidence: Evidence) -> Iterator[Answer]:
    used: Seen = seen(evidence, ADDRESS_IN_USE)
    if used and not used.values.get("zmq"):
        yield Finding(
            used.leg,
            "certain",
            used.excerpts,
            "The leg cannot listen on its port: another process holds it, mostly an earlier "
            "instance of the leg that did not end.",
            "ss -ltnp shows who holds it. End what is left over (pdctl down SPEC) or give the leg "
            "another port.",
        )


def _never_started(evidence: Evidence) -> Iterator[Answer]:
    failed = any_seen(evidence, (NOT_READY, ENGINE_DEAD))
    killed = seen(evidence, OUT_OF_MEMORY_KILL)
    stopped = {leg.name for leg in evidence.legs if SHUTDOWN.name in leg.hits}
    if failed and not (set(failed.legs) <= stopped and not seen(evidence, NOT_READY)):
        yield Finding(
            failed.leg,
            "possible",
            (*failed.excerpts[:2], *killed.excerpts[:1]),
            "The engine died or did not start; this line is only the last of it.",
            "Read the first traceback above it in the leg's log: pdctl logs SPEC LEG -n 200.",
        )


CHECKS = (
    Check(
        "PD8501",
        "Peers hold the agent of an engine that is gone",
        Category.LAUNCH_LIFECYCLE,
        "error",
        "stale-agent-after-restart",
        _stale_agent,
        needs=("log|commands|metrics",),
        patterns=(
            STALE_QUEUE_PAIR,
            REMOTE_DISCONNECT,
            AGENT_UNKNOWN,
            TRANSFER_FAILURE,
            *LOG_SETTINGS,
        ),
        explains=(
            "PD1013",
            "PD1015",
            "PD2006",
            "PD2007",
            "PD2009",
            "PD4511",
            "PD6507",
            "PD8505",
        ),
    ),
    Check(
        "PD8502",
        "Stopped while a peer was reading",
        Category.LAUNCH_LIFECYCLE,
        "error",
        "stopped-mid-read",
        _stopped_mid_read,
        needs=("log|commands",),
        patterns=(SHUTDOWN, TRANSFER_FAILURE),
        explains=("PD2006", "PD2009", "PD6507"),
    ),
    Check(
        "PD8503",
        "The leg's port is taken",
        Category.LAUNCH_LIFECYCLE,
        "error",
        "port-taken",
        _port_taken,
        needs=("log|commands",),
        patterns=(ADDRESS_IN_USE,),
        explains=("PD8505", "PD8560"),
    ),
    Check(
        "PD8505",
        "The engine died",
        Category.LAUNCH_LIFECYCLE,
        "error",
        "engine-died",
        _never_started,
        needs=("log|commands",),
        patterns=(NOT_READY, ENGINE_DEAD, OUT_OF_MEMORY_KILL, SHUTDOWN),
        explains=("PD2005", "PD2009"),
    ),
)

MORE = (More("PD8501", _crash_in_metadata, ("log",), (CRASH_IN_METADATA, SEGFAULT)),)
