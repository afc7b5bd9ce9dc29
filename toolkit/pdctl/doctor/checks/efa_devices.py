"""Whether the legs see their EFA devices."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.reading import any_seen, seen
from pdctl.doctor.checks.settings import (
    LOG_SETTINGS,
    backends,
    efa_is_meant,
    tcp_is_meant,
    ucx_only,
)
from pdctl.doctor.evidence.facts import Command, Evidence, LegEvidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

NO_PROVIDER = Pattern(
    "no-fabric-provider",
    ("fi_getinfo", "aws-ofi-nccl initialization failed", "find a protocol that worked"),
    r"(?i)fi_getinfo(?:\(\))?(?: call)?(?::| failed).{0,400}(?:No data available|-61|not available)"
    r"|aws-ofi-nccl initialization failed|Unable to find a protocol that worked",
)
NO_NETWORK_DEVICES = Pattern(
    "no-network-devices",
    (
        "No network devices found",
        "no suitable network providers",
        "No network devices discovered",
        "Failed to discover EFA devices",
        "Could not find EFA devices",
        "No valid EFA devices",
        "no EFA devices found",
        "No EFA devices found",
    ),
)
CANNOT_OPEN_DEVICE = Pattern(
    "verbs-device-unopenable",
    ("ibv_open_device failed", "efa_device_construct", "Failed to open device"),
    r"ibv_open_device failed|efa_device_construct\w* failed|efa.{0,400}Failed to open device",
)
_FOREIGN_DEVICE = re.compile(r"\b(?:mlx[45]_\w+|ibp\d+s\w+|rocep\w+|roce\w+|bnxt_re\w*|irdma\w*)\b")
_EFA_DEVICE = re.compile(r"\b(?:rdmap\d+s\d+\w*|efa_\d+)\b")
_NO_DEVICES = re.compile(
    r"cannot access '?/dev/infiniband|No such file or directory|No IB devices found|"
    r"No IB device|no RDMA devices"
)

EFA_COUNT = {
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
    "p6-b300.48xlarge": 16,
    "p6e-gb200.36xlarge": 17,
    "trn1.32xlarge": 8,
    "trn1n.32xlarge": 16,
    "trn2.48xlarge": 16,
}
"""EFA interfaces by instance type. Source: Amazon EC2's accelerated computing specifications."""


def _fi_info(leg: LegEvidence) -> list[Command]:
    return [command for command in leg.commands if re.search(r"\bfi_info\b", command.line)]


def empty_efa(leg: LegEvidence) -> Command | None:
    """``fi_info -p efa`` that printed no provider."""
    for command in _fi_info(leg):
        if "FI_HMEM" in command.line or not re.search(r"-p\s*efa|efa", command.line):
            continue
        if re.search(r"fi_getinfo: -?61|No data available", command.output):
            return command
    return None


def _nothing_to_offer(leg: LegEvidence) -> Command | None:
    """What the device plugin says on a node without EFA devices."""
    for command in leg.commands:
        if re.search(r"(?i)\bno (?:valid )?EFA devices", command.output):
            return command
    return None


def _missing_devices(leg: LegEvidence) -> Command | None:
    for command in leg.commands:
        if re.search(r"/dev/infiniband", command.line) and _NO_DEVICES.search(command.output):
            return command
        if re.search(r"\bibv_devices\b|\bibv_devinfo\b|\bibstat\b", command.line):
            rows = re.sub(
                r"(?m)^[\s-]*$|^\s*device\s+node GUID.{0,400}$", "", command.output
            ).strip()
            if not rows or _NO_DEVICES.search(command.output):
                return command
    return None


def _foreign_devices(leg: LegEvidence) -> Command | None:
    for command in leg.commands:
        if not re.search(r"infiniband|ibv_|rdma\b", command.line):
            continue
        if _FOREIGN_DEVICE.search(command.output) and _EFA_DEVICE.search(command.output):
            return command
    return None


def _foreign(evidence: Evidence) -> Iterator[Answer]:
    unopenable = seen(evidence, CANNOT_OPEN_DEVICE)
    for leg in evidence.legs:
        empty, foreign = empty_efa(leg), _foreign_devices(leg)
        if not (empty and foreign) and leg.name not in unopenable.legs:
            continue
        shown = [each.excerpt for each in (foreign, empty) if each]
        yield Finding(
            leg.name,
            "certain" if foreign and unopenable else "likely",
            (*unopenable.excerpts[:1], *shown),
            "The container sees RDMA devices that are not EFA and that it may not open. This "
            "libfabric's efa provider gives up on all devices when one cannot be opened, so EFA "
            "looks absent although its own devices are there.",
            "Do not mount all of /dev/infiniband (no hostPath): request vpc.amazonaws.com/efa: N "
            "and let the device plugin hand in only EFA's uverbs devices. Check: ls "
            "/sys/class/infiniband and fi_info -p efa -t FI_EP_RDM. Or upgrade libfabric to a "
            "release that skips such devices.",
        )


def _absent(evidence: Evidence) -> Iterator[Answer]:
    if tcp_is_meant(evidence):
        return
    log = any_seen(evidence, (NO_PROVIDER, NO_NETWORK_DEVICES))
    for leg in evidence.legs:
        empty, missing = empty_efa(leg) or _nothing_to_offer(leg), _missing_devices(leg)
        in_log = leg.name in log.legs and any(
            excerpt.source.startswith(f"{leg.name}/log") for excerpt in log.excerpts
        )
        if not in_log and ucx_only(evidence):
            continue
        if not (in_log or empty or (missing and (efa_is_meant(evidence) or backends(evidence)))):
            continue
        if _foreign_devices(leg):
            continue
        cause = (
            "The EFA devices (/dev/infiniband/uverbsN) are not in this container or on this node, "
            "so libfabric's efa provider has nothing to open."
            if missing or not in_log
            else "libfabric's efa provider finds no device: the EFA devices are not in this "
            "container, EFA is not enabled on the instance's interfaces, or this libfabric was "
            "built without efa."
        )
        shown = tuple(each.excerpt for each in (empty, missing) if each)
        excerpts = (*shown, *(each for each in log.excerpts if each.source.startswith(leg.name)))
        yield Finding(
            leg.name,
            "certain" if missing else "likely",
            excerpts[:4],
            cause,
            "Pass every /dev/infiniband/uverbsN into the container (docker --device, or request "
            "vpc.amazonaws.com/efa: N in the pod; --gpus does not bring them). On a bare node "
            "install the EFA installer again and check that the interfaces are of type efa. Then "
            "run in the same place: fi_info -p efa -t FI_EP_RDM (one group of entries per device).",
        )


def _device_count(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.legs:
        old = _old_plugin(leg)
        counted = _advertised(leg)
        instance = _instance(leg)
        expected = EFA_COUNT.get(instance or "")
        too_many = bool(counted and expected and counted[0] > expected)
        if not (too_many or (old and counted)):
            continue
        shown = [excerpt for excerpt in (old, counted[1] if counted else None) if excerpt]
        text = (
            f"the node offers {counted[0]} EFA devices, {instance} has {expected}"
            if counted and expected
            else "the node's count is not to be trusted"
        )
        yield Finding(
            leg.name,
            "likely" if too_many else "possible",
            tuple(shown),
            f"The EFA device plugin counts interfaces that are not EFA ({text}): plugins before "
            "0.5.10 take the board's other RDMA controllers (ibp*) for EFA. Pods that are given "
            "one of those time out.",
            "Upgrade aws-efa-k8s-device-plugin to 0.5.10 or later and compare kubectl get node "
            "NODE -o jsonpath='{.status.allocatable}' with the instance type's EFA count "
            "(p4d 4, p5 32, p5en 16, p6-b200 8).",
        )


def _old_plugin(leg: LegEvidence) -> Excerpt | None:
    for name, text in (leg.versions or {}).items():
        if "efa" in name and "plugin" in name:
            numbers = tuple(map(int, re.findall(r"\d+", text)[:3]))
            if numbers and numbers < (0, 5, 10):
                return Excerpt(f"{leg.name}/versions.txt", f"{name} {text}")
    return None


def _advertised(leg: LegEvidence) -> tuple[int, Excerpt] | None:
    for command in leg.commands:
        if "efa" not in command.line + command.output or "kubectl" not in command.line:
            continue
        match = re.search(r"aws\.com/efa\D{0,6}(\d+)", command.output) or (
            re.fullmatch(r"\s*(\d+)\s*", command.output) if "efa" in command.line else None
        )
        if match:
            return int(match[1]), command.excerpt
    return None


def _instance(leg: LegEvidence) -> str | None:
    text = " ".join([*(leg.versions or {}).values(), *(c.output for c in leg.commands)])
    return next((name for name in EFA_COUNT if re.search(rf"\b{re.escape(name)}\b", text)), None)


CHECKS = (
    Check(
        "PD1001",
        "No EFA device",
        Category.EFA_FABRIC,
        "error",
        "no-efa-device",
        _absent,
        needs=("log|commands",),
        patterns=(NO_PROVIDER, NO_NETWORK_DEVICES, *LOG_SETTINGS),
        explains=("PD1004", "PD1009", "PD1015", "PD1061", "PD2005", "PD2009", "PD6502"),
    ),
    Check(
        "PD1002",
        "Foreign RDMA devices hide EFA",
        Category.EFA_FABRIC,
        "error",
        "foreign-rdma-devices",
        _foreign,
        needs=("log|commands",),
        patterns=(CANNOT_OPEN_DEVICE,),
        explains=("PD1001", "PD1004", "PD1005", "PD1009", "PD1015", "PD1061", "PD2009"),
    ),
    Check(
        "PD1003",
        "Device plugin counts interfaces that are not EFA",
        Category.EFA_FABRIC,
        "error",
        "device-plugin-count",
        _device_count,
        needs=("commands|versions",),
    ),
)
