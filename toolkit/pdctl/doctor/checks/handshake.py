"""The handshake over the side channel, and connections that break after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pdctl.doctor.checks.captures import LOCAL_ADDRESS, remote_hosts
from pdctl.doctor.checks.lifecycle import restarted_peer
from pdctl.doctor.checks.lines import (
    ADDRESS_IN_USE,
    AGENT_UNKNOWN,
    CONTEXT_HOST,
    ENGINE_DEAD,
    ENGINE_ID_MISMATCH,
    LOAD_FAILURE_RECOVERED,
    REMOTE_DISCONNECT,
    TRANSFER_FAILURE,
)
from pdctl.doctor.checks.reading import (
    LOG_SETTINGS,
    Seen,
    Setting,
    number,
    older,
    same,
    seen,
    setting,
    settings,
    vllm_version,
)
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.evidence.metrics import Metrics
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

OWN_ID = Pattern(
    "context-own-engine-id",
    ("'engine_id'",),
    r"['\"]engine_id['\"]: ['\"](?P<own>[^'\"]+)['\"]",
)
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
    r"(?:(?P<when>\d\d:\d\d:\d\d)\b.*)?(?:zmq\.error\.Again|handshake timed out"
    r"|(?i:side[ -]channel.*(?:refused|timed? ?out|unreachable|no route))"
    r"|(?P<alone>KVPoll\.Bootstrapping"
    r"|(?i:bootstrap (?:server|failed|connection)\b.*(?:timed out|refused|failed to connect)))"
    r"|(?P<name>Name or service not known|Temporary failure in name resolution))",
)
LISTENING = Pattern(
    "side-channel-listening",
    ("Starting listening on path",),
    r"(?P<when>\d\d:\d\d:\d\d)\b.*Starting listening on path",
)
BAD_ADDRESS = Pattern(
    "side-channel-address-malformed",
    ("Invalid argument (addr=", "make_zmq_path", "Protocol not supported (addr="),
    r"Invalid argument \(addr=['\"](?P<address>[^'\"]+)",
)
NOT_MY_ADDRESS = Pattern(
    "side-channel-address-foreign",
    ("Cannot assign requested address", "No such device (addr=", "EADDRNOTAVAIL"),
    r"(?:Cannot assign requested address|No such device)(?: \(addr=['\"]tcp://(?P<address>[^'\"]+))?",
)
LISTENER_DIED = Pattern(
    "handshake-listener-died",
    ("Exception in thread nixl_handshake_listener", "nixl_handshake_listener"),
    r"Exception in thread nixl_handshake_listener",
)
KEY_ERROR = Pattern("key-error", ("KeyError:",), r"KeyError: ")

SIDE_PORTS = re.compile(r"\b(?:5557|56\d\d)\b")


def _local_host(evidence: Evidence) -> Iterator[Answer]:
    mismatch, failed = seen(evidence, ENGINE_ID_MISMATCH), seen(evidence, TRANSFER_FAILURE)
    context = seen(evidence, CONTEXT_HOST)
    local: list[tuple[str, Excerpt]] = []
    for leg, capture, host in remote_hosts(evidence):
        if LOCAL_ADDRESS.match(host):
            local.append((leg.name, Excerpt(capture.source, f"remote_host: {host}")))
    for host in context.counts("host"):
        if LOCAL_ADDRESS.match(host):
            local.append((DEPLOYMENT, context.excerpts[0]))
    stated = settings(evidence, "side_host", "prefill", "decode")
    wrong = [each for each in stated if LOCAL_ADDRESS.match(str(each.value))]
    local += [(each.leg, each.excerpt) for each in wrong]
    own = seen(evidence, OWN_ID).counts("own")
    itself = [r for r in mismatch.counts("received") if r in own]
    if not local and not itself:
        return
    routable = [each for each in stated if not LOCAL_ADDRESS.match(str(each.value))]
    apart = bool(routable) or _several_hosts(evidence)
    symptom = bool(mismatch) or (bool(failed) and bool(local))
    wildcard = any("0.0.0.0" in excerpt.text for _, excerpt in local)
    if not (symptom or apart or wildcard):
        return
    yield Finding(
        next((name for name, _ in local if name != DEPLOYMENT), mismatch.leg),
        "certain" if symptom and local else "likely",
        (*(excerpt for _, excerpt in local[:2]), *mismatch.excerpts[:2], *failed.excerpts[:1])[:4],
        "The side channel is advertised under an address that only its own host can use "
        "(VLLM_NIXL_SIDE_CHANNEL_HOST is unset, a loopback address or a wildcard). The peer "
        "resolves it to itself, shakes hands with its own listener and recomputes every prompt.",
        "Set VLLM_NIXL_SIDE_CHANNEL_HOST on every leg to the address that its peers reach it at "
        "(pod or node IP; 0.0.0.0 is wrong too, it is what gets advertised) and restart the legs.",
        severity=None if symptom or apart else "warning",
    )


def _several_hosts(evidence: Evidence) -> bool:
    nodes = {str(each.value) for each in settings(evidence, "node", "prefill", "decode")}
    planned = (
        {leg.host for leg in evidence.plan.legs if leg.role != "router"} if evidence.plan else set()
    )
    return len(nodes) > 1 or len(planned) > 1


def _port_collision(evidence: Evidence) -> Iterator[Answer]:
    used = seen(evidence, ADDRESS_IN_USE)
    addresses = used.counts("zmq")
    for leg in evidence.legs:
        overlap = _overlap(leg.name, evidence)
        told = leg.name in used.legs and bool(addresses)
        if not overlap and not told:
            continue
        yield Finding(
            leg.name,
            "certain" if told else "likely",
            (*(used.excerpts[:2] if told else ()), *overlap)[:4],
            "Two sockets want one port: "
            + (
                "side channels and the KV events publisher must not overlap (each takes one port "
                "per data parallel rank, from its base)."
                if overlap
                else f"{next(iter(addresses))} is held by another process: another leg on this "
                "host with the same VLLM_NIXL_SIDE_CHANNEL_PORT, the KV events publisher, or a "
                "process that did not end."
            ),
            "Give every leg on a host its own VLLM_NIXL_SIDE_CHANNEL_PORT (5600 and up, one port "
            "per data parallel rank) away from --kv-events-config's endpoint (5557). ss -ltnp "
            "shows who holds it.",
        )


def _overlap(leg: str, evidence: Evidence) -> tuple[Excerpt, ...]:
    if shared := _same_port(leg, evidence):
        return shared
    for each in evidence.legs:
        if each.name != leg or not each.config:
            continue
        for path, value in each.config.values:
            match = re.search(r":(\d{2,5})$", str(value))
            if not path.endswith("endpoint") or "event" not in path or not match:
                continue
            base = number(each.variable("VLLM_NIXL_SIDE_CHANNEL_PORT") or "5600") or 5600
            ranks = number(each.config.get("data_parallel_size", 1)) or 1
            if base <= int(match[1]) < base + ranks:
                return (
                    Excerpt(f"{leg}/config.txt", f"{path}: {value}"),
                    Excerpt(f"{leg}/config.txt", f"VLLM_NIXL_SIDE_CHANNEL_PORT: {base:g}"),
                )
    return ()


def _same_port(leg: str, evidence: Evidence) -> tuple[Excerpt, ...]:
    """Another leg on this leg's host with the same side channel port."""
    if _several_hosts(evidence):
        return ()
    ports = {each.leg: each for each in settings(evidence, "side_port")}
    hosts = {each.leg: each for each in settings(evidence, "side_host")}
    mine, host = ports.get(leg), hosts.get(leg)
    for other, theirs in ports.items():
        if not (other < leg and mine and host and other in hosts):
            continue
        if same(mine.value, theirs.value) and same(host.value, hosts[other].value):
            return mine.excerpt, theirs.excerpt
    return ()


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
            for path, value in leg.config.values if leg.config else ():
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


def _malformed(evidence: Evidence) -> Iterator[Answer]:
    bad = seen(evidence, BAD_ADDRESS)
    captured = [
        Excerpt(capture.source, match[0])
        for leg in evidence.legs
        for capture in leg.http
        if "remote_block_ids" in capture.text
        and (
            match := re.search(
                r'"remote_(?:port|host)"\s*:\s*(?:null|"None"|""|\d+\.\d+)', capture.text
            )
        )
    ]
    if bad or captured:
        yield Finding(
            bad.leg if bad else DEPLOYMENT,
            "certain" if bad else "likely",
            (*bad.excerpts[:2], *captured[:1]),
            "The side channel's address in kv_transfer_params is malformed"
            + (f" ({bad.value('address')})" if bad else "")
            + ": what carries the parameters changed their types (a port that became 5600.0, a "
            "null), so the peer cannot be dialled.",
            "Carry kv_transfer_params as they came, without converting numbers (protobuf's Struct "
            "knows only doubles; send the port as text there).",
        )


def _foreign_address(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, NOT_MY_ADDRESS)
    if found:
        host = setting(evidence, "side_host", "prefill", "decode")
        yield Finding(
            found.leg,
            "certain",
            (*found.excerpts[:2], *((host.excerpt,) if host else ())),
            "The leg cannot listen on its side channel: the address "
            f"{found.value('address') or ''} is none of this node's.",
            "Set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of the node that the leg runs on (ip "
            "addr); in a pdctl spec the leg's host.",
        )


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
        "PD2001",
        "The side channel's address is local",
        Category.NIXL_HANDSHAKE,
        "error",
        "side-channel-host",
        _local_host,
        needs=("log|env|config|http",),
        patterns=(ENGINE_ID_MISMATCH, TRANSFER_FAILURE, CONTEXT_HOST, OWN_ID, *LOG_SETTINGS),
        explains=("PD2003", "PD2005", "PD2007", "PD2009", "PD2061", "PD4501", "PD4511", "PD6507"),
    ),
    Check(
        "PD2002",
        "Two sockets want one port",
        Category.NIXL_HANDSHAKE,
        "error",
        "side-channel-port-taken",
        _port_collision,
        needs=("log|env|config",),
        patterns=(ADDRESS_IN_USE,),
        explains=("PD2005", "PD2008", "PD2009", "PD8505", "PD8560"),
    ),
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
        explains=("PD2009", "PD2061"),
    ),
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
        "PD2010",
        "The side channel's address is malformed",
        Category.NIXL_HANDSHAKE,
        "error",
        "side-channel-address-malformed",
        _malformed,
        needs=("log|http",),
        patterns=(BAD_ADDRESS,),
        explains=("PD2005", "PD2009", "PD4510"),
    ),
    Check(
        "PD2011",
        "The side channel's address is another node's",
        Category.NIXL_HANDSHAKE,
        "error",
        "side-channel-address-foreign",
        _foreign_address,
        needs=("log|commands",),
        patterns=(NOT_MY_ADDRESS, *LOG_SETTINGS),
        explains=("PD2005", "PD2009", "PD2060", "PD8505", "PD8560"),
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
