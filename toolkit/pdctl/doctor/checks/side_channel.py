"""The side channel: its address, its port, and whether it answers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.captures import LOCAL_ADDRESS, remote_hosts
from pdctl.doctor.checks.lines import (
    ADDRESS_IN_USE,
    ENGINE_ID_MISMATCH,
    TRANSFER_FAILURE,
)
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import (
    LOG_SETTINGS,
    config_values,
    number,
    same,
    setting,
    settings,
)
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

BAD_ADDRESS = Pattern(
    "side-channel-address-malformed",
    ("Invalid argument (addr=", "make_zmq_path", "Protocol not supported (addr="),
    r"Invalid argument \(addr=['\"](?P<address>[^'\"]+)",
)
UNRESOLVED = Pattern(
    "name-does-not-resolve", ("Name or service not known", "Temporary failure in name resolution")
)
NOT_MY_ADDRESS = Pattern(
    "side-channel-address-foreign",
    ("Cannot assign requested address", "No such device (addr=", "EADDRNOTAVAIL"),
    r"(?:Cannot assign requested address|No such device)(?: \(addr=['\"]tcp://(?P<address>[^'\"]+))?",
)


def _local_host(evidence: Evidence) -> Iterator[Answer]:
    mismatch, failed = seen(evidence, ENGINE_ID_MISMATCH), seen(evidence, TRANSFER_FAILURE)
    local: list[tuple[str, Excerpt]] = []
    for leg, capture, host in remote_hosts(evidence):
        if LOCAL_ADDRESS.match(host):
            local.append((leg.name, Excerpt(capture.source, f"remote_host: {host}")))
    for host in failed.counts("host"):
        if LOCAL_ADDRESS.match(host):
            local.append((DEPLOYMENT, failed.excerpts[0]))
    stated = settings(evidence, "side_host", "prefill", "decode")
    wrong = [each for each in stated if LOCAL_ADDRESS.match(str(each.value))]
    local += [(each.leg, each.excerpt) for each in wrong]
    own = failed.counts("own")
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
        for path, value in config_values(each):
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
    # A peer's name that does not resolve reads alike; that is PD2005.
    if found and not seen(evidence, UNRESOLVED):
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


CHECKS = (
    Check(
        "PD2001",
        "The side channel's address is local",
        Category.NIXL_HANDSHAKE,
        "error",
        "side-channel-host",
        _local_host,
        needs=("log|env|config|http",),
        patterns=(ENGINE_ID_MISMATCH, TRANSFER_FAILURE, *LOG_SETTINGS),
        explains=("PD2003", "PD2005", "PD2007", "PD2009", "PD4501", "PD4511", "PD6507"),
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
        "PD2010",
        "The side channel's address is malformed",
        Category.NIXL_HANDSHAKE,
        "error",
        "side-channel-address-malformed",
        _malformed,
        needs=("log|http",),
        patterns=(BAD_ADDRESS,),
        explains=("PD2005", "PD2008", "PD2009", "PD4510"),
    ),
    Check(
        "PD2011",
        "The side channel's address is another node's",
        Category.NIXL_HANDSHAKE,
        "error",
        "side-channel-address-foreign",
        _foreign_address,
        needs=("log|commands",),
        patterns=(NOT_MY_ADDRESS, UNRESOLVED, *LOG_SETTINGS),
        explains=("PD2005", "PD2008", "PD2009", "PD8505", "PD8560"),
    ),
)
