"""What comes of a handshake: no answer, another engine, a shared id."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pdctl.doctor.checks.lines import (
    ADDRESS_IN_USE,
    ENGINE_DEAD,
    ENGINE_ID_MISMATCH,
    TRANSFER_FAILURE,
)
from pdctl.doctor.checks.reading import Seen, older, seen, vllm_version
from pdctl.doctor.checks.settings import LOG_SETTINGS, Setting, config_values, number, settings
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Finding, Pattern

NO_ANSWER = Pattern(
    "side-channel-no-answer",
    (
        "zmq.error.Again",
        "side channel",
        "side-channel",
        "handshake timed out",
        "KVPoll.Bootstrapping",
        "ootstrap",
        "Name or service not known",
        "Temporary failure in name resolution",
    ),
    r"zmq\.error\.Again|handshake timed out"
    r"|(?i:side[ -]channel.{0,400}(?:refused|timed? ?out|unreachable|no route))"
    r"|(?P<alone>KVPoll\.Bootstrapping"
    r"|(?i:bootstrap (?:server|failed|connection)\b.{0,400}"
    r"(?:timed out|refused|failed to connect)))"
    r"|(?P<name>Name or service not known|Temporary failure in name resolution)",
    timed=True,
)
LISTENING = Pattern(
    "side-channel-listening",
    ("Starting listening on path",),
    r"Starting listening on path",
    timed=True,
)
LISTENER_DIED = Pattern(
    "handshake-listener-died",
    ("Exception in thread nixl_handshake_listener", "nixl_handshake_listener"),
    r"Exception in thread nixl_handshake_listener",
)
KEY_ERROR = Pattern("key-error", ("KeyError:",), r"KeyError: ")

SIDE_PORTS = re.compile(r"\b(?:5557|56\d\d)\b")


def _shared_id(evidence: Evidence) -> Iterator[Answer]:
    ids = [
        each
        for each in settings(evidence, "engine_id", "prefill", "decode")
        if not re.search(r"\$|\{", str(each.value))
    ]
    counted = Counter(str(each.value) for each in ids if "{" not in str(each.value))
    twice = [each for each in ids if counted[str(each.value)] > 1]
    ranks = [each for each in ids if _replicas(evidence, each)]
    mismatch = seen(evidence, ENGINE_ID_MISMATCH)
    alike = [
        (expected, received)
        for expected in mismatch.counts("expected")
        for received in mismatch.counts("received")
        if expected != received and (received.startswith(expected) or expected.startswith(received))
    ]
    if not twice and not (ranks or alike):
        return
    shared = (twice or ranks)[0] if twice or ranks else None
    name = str(shared.value) if shared else alike[0][0]
    yield Finding(
        shared.leg if shared else mismatch.leg,
        "certain" if shared and mismatch else "likely",
        (*(each.excerpt for each in (twice or ranks)[:2]), *mismatch.excerpts[:2])[:4],
        f"Several engine processes go by one engine_id ({name}): a literal id is one per "
        "configuration, not one per process. Peers keep one agent per id, so they read another "
        "rank's memory or fail the mismatch check.",
        "Leave engine_id out (vLLM makes a fresh one) or add host, rank and a part that is new at "
        "every start; in a pdctl spec: kv_transfer.engine_id: '{deployment}-{leg}-{nonce}'.",
    )


def _replicas(evidence: Evidence, each: Setting) -> bool:
    for leg in evidence.legs:
        if leg.name == each.leg or leg.role in (each.role, DEPLOYMENT):
            ranks = leg.config.get("data_parallel_rank") if leg.config else None
            if isinstance(ranks, list) and len(ranks) > 1:
                return True
            for path, value in config_values(leg):
                mine = leg.role == each.role or each.role in path
                if mine and path.endswith("replicas") and (number(value) or 1) > 1:
                    return True
    return False


def _kills_engine(evidence: Evidence) -> Iterator[Answer]:
    dead, failed = seen(evidence, ENGINE_DEAD), seen(evidence, TRANSFER_FAILURE)
    handshake = any("handshake" in each for each in failed.counts("type")) or (
        failed and "id" in failed.values
    )
    if not dead or not handshake:
        return
    told = vllm_version(evidence)
    if told and not older(told[0], "0.20"):
        return
    keys = seen(evidence, KEY_ERROR)
    yield Finding(
        dead.leg,
        "certain" if told else "likely",
        (
            *failed.excerpts[:1],
            *keys.excerpts[:1],
            *dead.excerpts[:1],
            *((told[1],) if told else ()),
        ),
        "A handshake with one bad peer ends this healthy engine: vLLM before 0.20 treats the "
        "request whose handshake failed like one that was received, and dies of a KeyError or an "
        "assertion, whatever kv_load_failure_policy says.",
        "Take the peer that does not answer out of the router first, then restart this leg. "
        "Upgrade vLLM to 0.20 or later: it skips requests whose handshake failed.",
    )


def _no_answer(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, NO_ANSWER)
    closed = [
        (leg.name, command.excerpt)
        for leg in evidence.legs
        for command in leg.commands
        if re.search(r"\b(?:nc|ncat|telnet|curl|nmap)\b", command.line)
        and SIDE_PORTS.search(command.line)
        and re.search(r"(?i)timed out|refused|unreachable|filtered", command.output)
    ]
    failed = seen(evidence, TRANSFER_FAILURE)
    alone = "alone" in found.values or "name" in found.values
    if not closed and not (found and (failed or alone)):
        return
    if _before_listening(evidence, found):
        return
    yield Finding(
        closed[0][0] if closed else found.leg,
        "certain" if closed else "likely",
        (*(excerpt for _, excerpt in closed[:1]), *found.excerpts[:2], *failed.excerpts[:1])[:4],
        "Nobody answers on the peer's side channel: its port is not reachable from here, it is "
        "not listening yet, or its listener has died (/health does not notice that).",
        "From this leg's node: nc -zv PEER 5600 (the port is VLLM_NIXL_SIDE_CHANNEL_PORT plus the "
        "data parallel rank). Open it between the legs' nodes; if it answers nothing although it "
        "is open, restart the peer.",
    )


def _before_listening(evidence: Evidence, unanswered: Seen) -> bool:
    """Whether all handshakes without answer came before the peer listened."""
    listening = seen(evidence, LISTENING).counts("when")
    asked = unanswered.counts("when")
    return bool(listening and asked) and max(asked) < min(listening)


def _too_early(evidence: Evidence) -> Iterator[Answer]:
    unanswered = seen(evidence, NO_ANSWER)
    if unanswered and _before_listening(evidence, unanswered):
        yield Finding(
            unanswered.leg,
            "likely",
            (*unanswered.excerpts[:2], *seen(evidence, LISTENING).excerpts[:1]),
            "Turns were sent before the peer's side channel listened: /health answers as soon as "
            "the HTTP server is up, and the listener comes later.",
            "Let traffic in only after a turn went through the pair (pdctl verify SPEC), or make "
            "the readiness probe ask the side channel too: nc -z HOST 5600.",
        )


def _other_peer(evidence: Evidence) -> Iterator[Answer]:
    mismatch = seen(evidence, ENGINE_ID_MISMATCH)
    if mismatch:
        yield Finding(
            mismatch.leg,
            "likely",
            mismatch.excerpts,
            "Another engine answers at the address that a handle names: the peer was restarted "
            "under a new id, or two legs share the address. Handles from before lead nowhere.",
            "Let the router forget handles of a leg that restarted (pd-router does by itself); "
            "check that each leg has its own host and port for the side channel.",
        )


def _listener(evidence: Evidence) -> Iterator[Answer]:
    died, used = seen(evidence, LISTENER_DIED), seen(evidence, ADDRESS_IN_USE)
    if died and not used:
        yield Finding(
            died.leg,
            "certain",
            died.excerpts,
            "The thread that answers handshakes has died; the leg stays healthy for /health, but "
            "no new peer can connect to it. One message with an unknown rank is enough.",
            "Restart the leg, and keep the side channel's port away from everything but the legs.",
        )


CHECKS = (
    Check(
        "PD2003",
        "Engines share an id",
        Category.NIXL_HANDSHAKE,
        "error",
        "engine-id-shared",
        _shared_id,
        needs=("log|config",),
        patterns=(ENGINE_ID_MISMATCH, *LOG_SETTINGS),
        explains=("PD2007", "PD2009"),
    ),
    Check(
        "PD2004",
        "A failed handshake ends the engine",
        Category.NIXL_HANDSHAKE,
        "error",
        "handshake-ends-engine",
        _kills_engine,
        needs=("log",),
        patterns=(ENGINE_DEAD, TRANSFER_FAILURE, KEY_ERROR),
        explains=("PD2005", "PD2009", "PD8505"),
    ),
    Check(
        "PD2005",
        "The side channel does not answer",
        Category.NIXL_HANDSHAKE,
        "error",
        "side-channel-no-answer",
        _no_answer,
        needs=("log|commands",),
        patterns=(NO_ANSWER, TRANSFER_FAILURE, LISTENING),
        premises=("PD2010", "PD2011"),
        explains=("PD2009",),
    ),
    Check(
        "PD2007",
        "Another engine answers the handshake",
        Category.NIXL_HANDSHAKE,
        "error",
        "other-engine-answers",
        _other_peer,
        needs=("log",),
        patterns=(ENGINE_ID_MISMATCH,),
        premises=("PD2001", "PD2003"),
        explains=("PD2009",),
    ),
    Check(
        "PD2008",
        "The handshake listener has died",
        Category.NIXL_HANDSHAKE,
        "error",
        "handshake-listener-died",
        _listener,
        needs=("log",),
        patterns=(LISTENER_DIED, ADDRESS_IN_USE),
        explains=("PD2005", "PD2009"),
    ),
    Check(
        "PD8504",
        "Traffic before the side channel listens",
        Category.LAUNCH_LIFECYCLE,
        "error",
        "ready-too-early",
        _too_early,
        needs=("log",),
        patterns=(NO_ANSWER, LISTENING),
        explains=("PD2005", "PD2009"),
    ),
)
