"""Compiled libraries that do not fit each other, and what the container gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.reading import seen
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Finding, More, Pattern

UNFIT = Pattern(
    "library-does-not-fit",
    (
        "undefined symbol",
        "GLIBC_",
        "GLIBCXX_",
        "CXXABI_",
        "driver version is insufficient",
        "no kernel image is available",
        "was compiled with",
    ),
    r"(?P<object>[\w./-]{1,200}\.so[\w.]{0,40}): undefined symbol: (?P<symbol>\S+)"
    r"|version [`'](?P<version>(?:GLIBC|GLIBCXX|CXXABI)_[\w.]+)'? not found"
    r"|(?P<driver>CUDA driver version is insufficient)"
    r"|(?P<kernel>no kernel image is available)",
)
UCX_TOO_OLD = Pattern(
    "ucx-api-incompatible",
    ("UCP API version is incompatible",),
    r"UCP API version is incompatible: required >= (?P<needed>[\w.]+), actual (?P<actual>[\w.]+)"
    r"(?: \(loaded from (?P<path>[^)]{1,300})\))?",
)
SHARED_MEMORY = Pattern(
    "shared-memory-too-small",
    ("hared memory", "Bus error", "bus error", "No space left on device"),
    r"(?i)out of shared memory|insufficient shared memory|bus error.{0,200}shared memory"
    r"|no space left on device.{0,100}(?:/dev/shm|psm_|torch_)"
    r"|(?:/dev/shm|psm_).{0,100}no space left on device",
)
_SHM = re.compile(r"(?m)^\S+\s+(?P<size>\S+)\s+\S+\s+\S+\s+(?P<used>\d{1,3})%\s+/dev/shm\s*$")


def _unfit(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, UNFIT)
    if not found:
        return
    symbol, version = found.value("symbol"), found.value("version")
    if found.counts("driver") or found.counts("kernel"):
        what, fix = (
            "CUDA code was built for another driver or GPU than this node has.",
            "Upgrade the GPU driver, or install the build for this CUDA version and GPU "
            "architecture; nvidia-smi shows the driver's CUDA version.",
        )
    elif version:
        what, fix = (
            f"A library was built on a newer system than this one ({version} is missing).",
            "Use a wheel built for this distribution (manylinux), or a newer base image.",
        )
    else:
        what, fix = (
            f"{found.value('object')} was built against another version of a library than the one "
            f"that is loaded ({symbol} is missing): mostly vLLM's extension against another torch.",
            "Install vLLM, torch and NIXL as one set (pip install vllm pulls its torch; do not "
            "upgrade torch beside it), or rebuild the extension. ldd -r FILE lists what is "
            "missing; LD_LIBRARY_PATH must not put a system copy first.",
        )
    yield Finding(found.leg, "certain", found.excerpts, what, fix)


def _old_ucx(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, UCX_TOO_OLD)
    if found:
        path = found.value("path")
        yield Finding(
            found.leg,
            "certain",
            found.excerpts,
            f"NIXL was built for UCX {found.value('needed')} and runs on {found.value('actual')}"
            + (f", taken from {path}" if path else "")
            + ": another UCX than the wheel's comes first on the loader path. It may work, or "
            "fail at the first registration or transfer.",
            "Take the system's or HPC-X's UCX out of LD_LIBRARY_PATH and LD_PRELOAD for the "
            "engines, or build NIXL against that UCX.",
            severity="warning",
        )


def _shared_memory(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, SHARED_MEMORY)
    full = [
        (leg.name, command.excerpt, row["size"])
        for leg in evidence.legs
        for command in leg.commands
        for row in _SHM.finditer(command.output)
        if int(row["used"]) >= 95
    ]
    if not found and not full:
        return
    size = f" ({full[0][2]})" if full else ""
    yield Finding(
        found.leg if found else full[0][0],
        "certain" if found else "likely",
        (*found.excerpts[:2], *(excerpt for _, excerpt, _ in full[:1])),
        f"The container's shared memory (/dev/shm) is full or too small{size}: workers of one "
        "engine exchange their messages and buffers there, and a container gets 64 MB of it "
        "unless told otherwise.",
        "Mount a memory volume at /dev/shm (Kubernetes: emptyDir with medium Memory, 16Gi or "
        "more) or start with docker --shm-size 16g or --ipc=host; df -h /dev/shm shows it.",
    )


CHECKS = (
    Check(
        "PD6512",
        "A compiled library does not fit",
        Category.VERSION_SKEW,
        "error",
        "library-does-not-fit",
        _unfit,
        needs=("log|commands",),
        patterns=(UNFIT,),
        premises=("PD1006", "PD6502", "PD6503", "PD6504", "PD6508"),
        explains=("PD8505", "PD8560"),
    ),
    Check(
        "PD7006",
        "Shared memory is too small",
        Category.MEMORY_SIZING,
        "error",
        "shared-memory-too-small",
        _shared_memory,
        needs=("log|commands",),
        patterns=(SHARED_MEMORY,),
        explains=("PD8505", "PD8560"),
    ),
)

MORE = (More("PD6504", _old_ucx, ("log",), (UCX_TOO_OLD,)),)
