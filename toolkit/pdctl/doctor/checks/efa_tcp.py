"""What libfabric and NCCL use instead of EFA, and how much of EFA they use."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.efa_devices import (
    EFA_COUNT,
    NO_NETWORK_DEVICES,
    _fi_info,
    _instance,
    empty_efa,
)
from pdctl.doctor.checks.lines import BACKEND_CREATED
from pdctl.doctor.checks.reading import Seen, seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, backends, efa_is_meant, tcp_is_meant
from pdctl.doctor.evidence.facts import Command, Evidence, LegEvidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

NCCL_PROVIDER = Pattern(
    "nccl-ofi-provider",
    ("Selected Provider is", "Selected provider is", "elected provider:"),
    r"[Ss]elected [Pp]rovider(?: is|:) (?P<provider>[\w;-]+)(?:.{0,400}?found (?P<nics>\d+) nics)?",
)
NCCL_SOCKET = Pattern(
    "nccl-network-socket",
    ("Using network Socket", "NET/Socket : Using"),
    r"Using network Socket|NET/Socket : Using",
)
TCP_RAIL = Pattern(
    "nixl-tcp-rail",
    ("TCP fallback", "provider=tcp", "provider=sockets", "tcp devices", "sockets devices"),
    r"TCP fallback|provider=(?:tcp|sockets)\b|Discovered \d+ (?:tcp|sockets) devices",
)
TOPOLOGY_FALLBACK = Pattern(
    "rail-topology-fallback",
    (
        "using fallback to use all available devices",
        "will use all available EFA devices",
        "Failed to build accelerator to EFA mapping",
        "returning all devices",
    ),
)


def other_provider(leg: LegEvidence) -> Command | None:
    """``fi_info`` that printed socket providers and no efa."""
    for command in _fi_info(leg):
        names = re.findall(
            r"(?m)^\s*(?:provider:\s*)?(efa|tcp|sockets|udp)\b(?=\s*(?::|;|$))", command.output
        )
        if names and "efa" not in names:
            return command
    return None


def _nccl_tcp(evidence: Evidence) -> Iterator[Answer]:
    if tcp_is_meant(evidence):
        return
    for leg in evidence.legs:
        hits = leg.hits.get(NCCL_PROVIDER.name)
        provider = hits.value("provider") if hits else None
        socket = leg.hits.get(NCCL_SOCKET.name)
        if hits and provider and re.match(r"(?:tcp|sockets?|udp|net)\b", provider):
            yield _nccl_finding(leg.name, hits.excerpts, f"the provider {provider}", "certain")
        elif not hits and socket and efa_is_meant(evidence):
            yield _nccl_finding(leg.name, socket.excerpts, "plain sockets", "likely")


def _nccl_finding(leg: str, excerpts: tuple[Excerpt, ...], what: str, confidence: str) -> Finding:
    return Finding(
        leg,
        "certain" if confidence == "certain" else "likely",
        excerpts,
        f"NCCL runs over {what}: no EFA device was given to the container, so libfabric's next "
        "provider won without an error.",
        "Give the container its EFA devices and export FI_PROVIDER=efa, so that their absence is "
        "an error and no fallback. A healthy line names efa and all interfaces of the instance.",
    )


def _libfabric_tcp(evidence: Evidence) -> Iterator[Answer]:
    if tcp_is_meant(evidence):
        return
    asked = {each.leg: each for each, names in backends(evidence) if "LIBFABRIC" in names}
    asked_roles = {each.role for each in asked.values()}
    for leg in evidence.engines:
        created = leg.hits.get(BACKEND_CREATED.name)
        chosen = created is not None and "LIBFABRIC" in created.values.get("backend", {})
        rail = leg.hits.get(TCP_RAIL.name)
        if not (chosen or rail or leg.name in asked or leg.role in asked_roles):
            continue
        other, empty = other_provider(leg), empty_efa(leg)
        told = str((leg.settings or {}).get("provider", ""))
        hard = leg.hits.get(NO_NETWORK_DEVICES.name)
        silent = (other or empty) and not hard and not efa_is_meant(evidence)
        if not (rail or silent or told in ("tcp", "sockets")):
            continue
        shown: list[Excerpt] = [*(rail.excerpts if rail else ())]
        shown += [each.excerpt for each in (other, empty) if each]
        if created and chosen:
            shown += created.excerpts[:1]
        if told:
            shown.append(Excerpt(f"{leg.name}/settings.json", f"provider: {told}"))
        yield Finding(
            leg.name,
            "certain" if rail or told else "likely",
            tuple(shown[:4]),
            "NIXL's LIBFABRIC backend runs on a single tcp rail: with no EFA device in sight it "
            "falls back to tcp without a word, and a tcp transfer that cannot proceed is retried "
            "without a deadline.",
            "Set FI_PROVIDER=efa (spec: fabric.provider: efa), so that missing EFA stops the "
            "start. Then give the leg its EFA devices: fi_info -p efa -t FI_EP_RDM must list "
            "them. Start once with NIXL_LOG_LEVEL=DEBUG and look for 'Created rail ... "
            "provider=efa'.",
        )


EFA_RAIL = Pattern(
    "efa-rail",
    ("Created rail",),
    r"Created rail \d+ \(device=(?P<device>[^,)]{1,100}), provider=efa",
)
_GPU = re.compile(r"(?m)^\s*GPU \d+: ")
_LIMIT = r"(?m)^\s*[\w.]{0,40}\b%s[\"']?\s*[:=]\s*[\"']?(\d{1,4})\b"


def _fewer_than_gpus(evidence: Evidence) -> Iterator[Finding]:
    """Devices that NIXL made rails of, or that the pod asks for, against the leg's GPUs."""
    for leg in evidence.engines:
        hits = leg.hits.get(EFA_RAIL.name)
        text = leg.config.text if leg.config else ""
        asked = re.search(_LIMIT % r"vpc\.amazonaws\.com/efa", text)
        limit = re.search(_LIMIT % r"nvidia\.com/gpu", text)
        listed = leg.command("^nvidia-smi -L")
        gpus = len(_GPU.findall(listed.output)) if listed else int(limit[1]) if limit else 0
        devices = len(hits.values.get("device", ())) if hits else int(asked[1]) if asked else 0
        if devices and devices < gpus:
            shown = (Excerpt(f"{leg.name}/config.txt", asked[0].strip()),) if asked else ()
            yield Finding(
                leg.name,
                "likely",
                (*shown, *(hits.excerpts[:2] if hits else ())),
                f"The leg has {gpus} GPUs and {devices} EFA interfaces: some GPUs have no "
                "interface of their own, and all share the bandwidth of few.",
                "Request as many interfaces as the instance has for these GPUs "
                "(vpc.amazonaws.com/efa; two per GPU on P5en), in resources.limits of the pod.",
            )


def _fewer_rails(evidence: Evidence) -> Iterator[Answer]:
    yield from _fewer_than_gpus(evidence)
    fallback: Seen = seen(evidence, TOPOLOGY_FALLBACK)
    if fallback and not tcp_is_meant(evidence):
        yield Finding(
            fallback.leg,
            "likely",
            fallback.excerpts,
            "NIXL could not map GPUs to the EFA devices on their PCIe switch, so every GPU uses "
            "every device and transfers cross the CPU sockets.",
            "Give the container the whole PCIe topology (/sys) and all devices; compare lstopo "
            "on the node and in the container.",
        )
    for leg in evidence.legs:
        hits = leg.hits.get(NCCL_PROVIDER.name)
        count, expected = (
            (hits.value("nics") if hits else None),
            EFA_COUNT.get(_instance(leg) or ""),
        )
        provider = hits.value("provider") if hits else None
        if hits and count and expected and provider and "efa" in provider and int(count) < expected:
            yield Finding(
                leg.name,
                "likely",
                hits.excerpts,
                f"Only {count} of the instance's {expected} EFA interfaces are in use.",
                "Request all of them (vpc.amazonaws.com/efa) and check that each was launched as "
                "interface type efa: ls /sys/class/infiniband.",
            )


CHECKS = (
    Check(
        "PD1004",
        "NCCL runs over sockets, not EFA",
        Category.EFA_FABRIC,
        "error",
        "nccl-provider-is-tcp",
        _nccl_tcp,
        needs=("log",),
        patterns=(NCCL_PROVIDER, NCCL_SOCKET, *LOG_SETTINGS),
    ),
    Check(
        "PD1005",
        "LIBFABRIC fell back to a tcp rail",
        Category.EFA_FABRIC,
        "error",
        "libfabric-tcp-rail",
        _libfabric_tcp,
        needs=("log|commands|settings",),
        patterns=(TCP_RAIL, BACKEND_CREATED, NO_NETWORK_DEVICES, *LOG_SETTINGS),
        explains=("PD1001", "PD1004", "PD1009", "PD1014", "PD2005", "PD2009"),
    ),
    Check(
        "PD1014",
        "Not all EFA interfaces are used as they should",
        Category.EFA_FABRIC,
        "warning",
        "rails-not-local",
        _fewer_rails,
        needs=("log",),
        patterns=(TOPOLOGY_FALLBACK, NCCL_PROVIDER, EFA_RAIL, *LOG_SETTINGS),
    ),
)
