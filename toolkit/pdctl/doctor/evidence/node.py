"""What commands say of a node: which ones, and running them.

Every command reads only. Their outputs are kept as text; :mod:`pdctl.doctor.evidence.fabric`
parses them, from a bundle as from here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_SECONDS = 5.0
_MOST_OUTPUT = 256 * 1024
_EXTRA_PATH = "/opt/amazon/efa/bin:/usr/local/cuda/bin:/usr/sbin:/sbin"

NODE: tuple[tuple[str, str], ...] = (
    ("fi_info", "fi_info --version"),
    ("fi_info", "fi_info -p efa -t FI_EP_RDM"),
    ("fi_info", "fi_info -p efa -t FI_EP_RDM -c FI_HMEM"),
    ("fi_info", "fi_info -l"),
    ("efa", "cat /opt/amazon/efa_installed_packages"),
    ("efa", "cat /sys/module/efa/version"),
    ("devices", "ls -l /sys/class/infiniband"),
    ("devices", "ls /dev/infiniband"),
    ("devices", "ls -l /sys/bus/pci/drivers/nvidia"),
    ("devices", "grep -H . /sys/class/infiniband/*/device/numa_node"),
    ("devices", "cat /sys/devices/virtual/dmi/id/product_name"),
    (
        "gpu",
        "nvidia-smi --query-gpu=index,name,driver_version,pci.bus_id --format=csv,noheader",
    ),
    ("gpu", "nvidia-smi --version"),
    ("gpu", "cat /usr/local/cuda/version.json"),
    ("kernel", "uname -r"),
    ("kernel", "grep -E '^(efa|efa_nv_peermem|nvidia_peermem|gdrdrv|nvidia) ' /proc/modules"),
    ("memory", "grep -E 'MemTotal|MemAvailable|HugePages_Total|Hugepagesize' /proc/meminfo"),
    ("rdma", "dpkg-query -W rdma-core || rpm -q rdma-core"),
)
"""(file in the bundle, command)."""

FABRIC_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH")
FABRIC_PREFIXES = ("FI_", "UCX_", "NIXL_")


def run_all(
    commands: Iterable[tuple[str, str]], env: Mapping[str, str]
) -> dict[str, list[tuple[str, str]]]:
    """(command, output) by file, all commands at once."""
    wanted = list(commands)
    env = dict(env)
    env["PATH"] = f"{env.get('PATH') or os.defpath}:{_EXTRA_PATH}"
    env["LC_ALL"] = "C"
    with ThreadPoolExecutor(8) as pool:
        outputs = pool.map(lambda item: run(item[1], env), wanted)
        found: dict[str, list[tuple[str, str]]] = {}
        for (file, line), output in zip(wanted, outputs, strict=True):
            found.setdefault(file, []).append((line, output))
    return found


def run(line: str, env: Mapping[str, str]) -> str:
    """What a command prints; its last line is ``# exit N`` when N is not 0."""
    try:
        done = subprocess.run(
            ["sh", "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"# no answer within {TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return f"# cannot be run: {error.strerror}"
    output = done.stdout[:_MOST_OUTPUT].decode(errors="replace").rstrip("\n")
    return f"{output}\n# exit {done.returncode}".lstrip("\n") if done.returncode else output


def fabric_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What of a leg's environment changes the answers."""
    return {
        name: value
        for name, value in env.items()
        if name in FABRIC_VARIABLES or name.startswith(FABRIC_PREFIXES)
    }
