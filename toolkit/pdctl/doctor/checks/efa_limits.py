"""Why EFA devices that are there cannot be used: reachability, locked memory, GPU memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.efa_devices import empty_efa
from pdctl.doctor.checks.reading import any_seen, seen
from pdctl.doctor.checks.settings import (
    LOG_SETTINGS,
    config_values,
    number,
    tcp_is_meant,
    wants_gpu,
)
from pdctl.doctor.evidence.facts import Command, Evidence, LegEvidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

UNREACHABLE = Pattern(
    "efa-peer-unreachable",
    (
        "prov_errno",
        "not reachable by the EFA device",
        "Unreachable remote",
        "nresponsive receiver",
        "nresponsive remote",
        "reachable by EFA device",
    ),
    r"prov_errno:? ?\(?(?P<errno>15|13|14|4124|4126)\b|(?P<never>not reachable by the EFA device"
    r"|Unreachable remote)|(?P<shared>[Uu]nresponsive (?:receiver|remote)|reachable by EFA device)",
)
CANNOT_LOCK = Pattern(
    "cannot-lock-memory",
    (
        "EFA internal error: (4112)",
        "post internal receive buffers",
        "Libfabric error: (-12)",
        "Libfabric error: (12)",
        "max locked memory",
        "RLIMIT_MEMLOCK",
        "memlock",
    ),
    r"\(4112\)|post internal receive buffers|Libfabric error: \(-?12\)"
    r"|set max locked memory|(?i:memlock).{0,400}(?:too low|limit|insufficient|exceed)",
)
REGISTRATION_NO_MEMORY = Pattern(
    "registration-no-memory",
    ("Unable to register MR", "fi_mr_reg failed", "ibv_reg_mr"),
    r"(?:Unable to register MR(?: of (?P<bytes>\d+) bytes)?|fi_mr_reg failed|ibv_reg_mr\w*).{0,400}"
    r"(?:Cannot allocate memory|ENOMEM)(?:.{0,400}?length[=:]? ?(?P<length>\d+))?",
)
NO_HMEM = Pattern(
    "no-hmem",
    ("FI_HMEM",),
    r"No provider found with FI_HMEM|does not support FI_HMEM|without FI_HMEM support",
)
GPU_REGISTRATION = Pattern(
    "gpu-registration-refused",
    (
        "Unable to register MR",
        "fi_mr_reg failed",
        "ibv_reg_mr",
        "ibv_reg_dmabuf_mr",
        "register handle for GPU memory",
        "fi_mr_regattr",
        "gdr_pin_buffer failed",
        "get_dmabuf_fd",
        "register CUDA buffer",
        "cuMemGetHandleForAddressRange",
    ),
    r"(?:register MR|fi_mr_reg\w*|ibv_reg_\w*mr\w*).{0,400}"
    r"(?:Bad address|EFAULT|Operation not supported"
    r"|Invalid argument)|(?:Protocol|Operation) not supported.{0,80}fi_mr_reg"
    r"|(?:Failed|Unable) to register CUDA buffer|cuMemGetHandleForAddressRange.{0,80}fail"
    r"|register handle for GPU memory|get_dmabuf_fd.{0,400}fail",
)


def _unreachable(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, UNREACHABLE)
    if not found:
        return
    numbers = set(found.counts("errno"))
    never = "15" in numbers or "never" in found.values
    shared = "shared" in found.values
    yield Finding(
        found.leg,
        "likely" if never or shared else "possible",
        found.excerpts,
        "EFA traffic does not reach the peer while ordinary TCP does: the security group has no "
        "rule for it or the interfaces are in different subnets. EFA bypasses the kernel and "
        "needs an all-protocol rule to and from its own group, inbound and outbound."
        if never or shared
        else f"A peer stopped answering over EFA (error {'/'.join(sorted(numbers))}): its process "
        "is gone, or the security group drops EFA traffic.",
        "Add 'All traffic' from and to the group itself, inbound and outbound, to the security "
        "group of every EFA interface; put both nodes into one subnet. Error 15 means never "
        "reachable: start with the security group. 13, 4124 and 4126 mean it was reachable: first "
        "see whether the peer still runs (pdctl status). Then test with fi_pingpong -p efa.",
    )


def locked_limit(leg: LegEvidence) -> tuple[float, Excerpt] | None:
    """The limit on locked memory in bytes (infinite when unlimited), as a command showed it."""
    for command in leg.commands:
        text = f"{command.line}\n{command.output}"
        match = re.search(r"Max locked memory\s+(\d+|unlimited)", command.output) or re.search(
            r"(?m)^memlock\D*(\d+|unlimited)", command.output
        )
        if match:
            return _bytes(match[1], 1), command.excerpt
        if "ulimit" in command.line and (
            match := re.search(
                r"(?m)(?:max locked memory.{0,400}?)?\b(\d+|unlimited)\s*$", command.output
            )
        ):
            # ulimit -l counts KiB, but containers are often told bytes; either is too low.
            return _bytes(match[1], 1024), Excerpt(command.source, text.strip())
    return None


def _bytes(text: str, unit: int) -> float:
    return float("inf") if text == "unlimited" else float(text) * unit


def _memlock(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, CANNOT_LOCK)
    refused = seen(evidence, REGISTRATION_NO_MEMORY)
    for leg in evidence.legs:
        limit = locked_limit(leg)
        unlimited = limit is not None and limit[0] == float("inf")
        told = leg.name in found.legs
        inferred = leg.name in refused.legs and limit is not None and limit[0] < 1 << 34
        if unlimited or not (told or inferred):
            continue
        excerpts = found.excerpts if told else refused.excerpts
        yield Finding(
            leg.name,
            "certain" if limit else "likely",
            (*excerpts[:3], *((limit[1],) if limit else ())),
            "The limit on locked memory (RLIMIT_MEMLOCK) is too low: the fabric pins its buffers, "
            "and the kernel refuses however much memory is free.",
            "Raise it to unlimited where the process starts: docker --ulimit memlock=-1:-1, "
            "systemd LimitMEMLOCK=infinity, /etc/security/limits.conf, or IPC_LOCK and the "
            "runtime's default in Kubernetes. Check in the process: grep locked "
            "/proc/PID/limits.",
        )


def _gpu_memory(evidence: Evidence) -> Iterator[Answer]:
    if tcp_is_meant(evidence) or not wants_gpu(evidence):
        return
    hmem, refused = seen(evidence, NO_HMEM), seen(evidence, GPU_REGISTRATION)
    for leg in evidence.legs:
        empty, module = _no_hmem_entry(leg), _no_peermem(leg)
        told = leg.name in hmem.legs or leg.name in refused.legs
        if not (told or (empty and not empty_efa(leg))):
            continue
        found = any_seen(evidence, (NO_HMEM, GPU_REGISTRATION))
        yield Finding(
            leg.name,
            "certain" if told and module else "likely",
            (*found.excerpts[:2], *(each.excerpt for each in (empty, module) if each)),
            "The NIC cannot reach GPU memory: neither a peer memory module (nvidia_peermem, "
            "efa_nv_peermem) nor dmabuf works here. The GPU's own 'GPUDirect RDMA supported' "
            "speaks of the GPU only; transfers then hang or go through host memory.",
            "Load the module (modprobe efa_nv_peermem or nvidia_peermem) or use a driver, kernel "
            "and libfabric with dmabuf. fi_info -p efa -c FI_HMEM must list entries before "
            "kv_buffer_device: cuda is used. Where registration says 'Bad address' with dmabuf "
            "on, upgrade libfabric (2.5.1 falls back by itself) or set FI_HMEM_CUDA_USE_DMABUF=0.",
        )


def _no_hmem_entry(leg: LegEvidence) -> Command | None:
    for command in leg.commands:
        asked = "fi_info" in command.line and "FI_HMEM" in command.line
        if asked and re.search(r"-61|No data", command.output):
            return command
    return None


def _no_peermem(leg: LegEvidence) -> Command | None:
    for command in leg.commands:
        asked = "peermem" in command.line or "lsmod" in command.line
        loaded = re.search(r"peermem\s+\d+", command.output) or re.fullmatch(
            r"\s*[1-9]\d*\s*", command.output
        )
        if asked and not loaded:
            return command
    return None


_HOST_POOL = re.compile(
    r"(?i)(?:cpu|host)\w*(?:cache|offload|buffer|pool|kv)\w*?(?:_(?P<unit>gi?b|mi?b|bytes))?$"
)
_UNITS = {"g": 1.0, "m": 1 / 1024, "b": 1 / (1 << 30)}
MOST_GIB = 90
"""About what EFA registers in pages of 4 KiB."""


def _pool_too_large(evidence: Evidence) -> Iterator[Answer]:
    """The same from the configuration alone, before it is tried."""
    for leg in evidence.legs:
        pages = next(
            (c.excerpt for c in leg.commands if re.search(r"HugePages_Total:\s+0\b", c.output)),
            None,
        )
        for path, value in config_values(leg):
            name = _HOST_POOL.search(path.rpartition(".")[2].replace("-", "_"))
            size = number(value) if name else None
            unit = (name["unit"] or "gib").lower()[0] if name else "g"
            if pages and size and size * _UNITS[unit] > MOST_GIB:
                yield Finding(
                    leg.name,
                    "likely",
                    (Excerpt(f"{leg.name}/config.txt", f"{path}: {value}"), pages),
                    f"A host buffer of {size * _UNITS[unit]:.0f} GiB in pages of 4 KiB is more "
                    "than an EFA device registers at once, and no huge pages are set up.",
                    "Set up huge pages (sysctl vm.nr_hugepages=N, 2 MiB each) or make the buffer "
                    "smaller than 90 GiB.",
                    severity="warning",
                )


def _too_many_pages(evidence: Evidence) -> Iterator[Answer]:
    if not seen(evidence, REGISTRATION_NO_MEMORY):
        yield from _pool_too_large(evidence)
    refused = seen(evidence, REGISTRATION_NO_MEMORY)
    for leg in evidence.legs:
        if leg.name not in refused.legs:
            continue
        limit = locked_limit(leg)
        sizes = [int(each) for name in ("bytes", "length") for each in refused.values.get(name, {})]
        huge = max(sizes, default=0) > 32 << 30
        if (limit and limit[0] < 1 << 34) or not (huge or (limit and limit[0] == float("inf"))):
            continue
        pages = next(
            (c.excerpt for c in leg.commands if re.search(r"HugePages_Total:\s+0\b", c.output)),
            None,
        )
        yield Finding(
            leg.name,
            "certain" if pages and huge else "likely",
            (*refused.excerpts[:2], *((pages,) if pages else ()), *((limit[1],) if limit else ())),
            "The host buffer is larger than the EFA device can register in 4 KiB pages: the number "
            "of pages in one registration is bounded, memory and the memlock limit are not the "
            "matter. Transparent huge pages do not help.",
            "Back the buffer with explicit huge pages (sysctl vm.nr_hugepages=N, 2 MiB each), or "
            "make the buffer smaller or split it; about 90 GiB is the most with 4 KiB pages.",
        )


CHECKS = (
    Check(
        "PD1007",
        "EFA traffic does not reach the peer",
        Category.EFA_FABRIC,
        "error",
        "efa-peer-unreachable",
        _unreachable,
        needs=("log|commands",),
        patterns=(UNREACHABLE,),
        explains=("PD2005", "PD2006", "PD2009", "PD6507", "PD8501", "PD4511"),
    ),
    Check(
        "PD1008",
        "Locked memory limit too low",
        Category.EFA_FABRIC,
        "error",
        "memlock-too-low",
        _memlock,
        needs=("log|commands",),
        patterns=(CANNOT_LOCK, REGISTRATION_NO_MEMORY),
        explains=("PD1015", "PD2009", "PD7001"),
    ),
    Check(
        "PD1009",
        "The NIC cannot reach GPU memory",
        Category.EFA_FABRIC,
        "error",
        "gpu-memory-not-registered",
        _gpu_memory,
        needs=("log|commands",),
        patterns=(NO_HMEM, GPU_REGISTRATION, *LOG_SETTINGS),
        explains=("PD1015", "PD2009"),
    ),
    Check(
        "PD7001",
        "Host buffer too large for 4 KiB pages",
        Category.MEMORY_SIZING,
        "error",
        "registration-needs-huge-pages",
        _too_many_pages,
        needs=("log|commands",),
        patterns=(REGISTRATION_NO_MEMORY,),
        explains=("PD1015", "PD2009"),
    ),
)
