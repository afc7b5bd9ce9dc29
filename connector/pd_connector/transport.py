"""What moves the KV blocks of this process, told by what it holds open, not by settings.

NIXL names its backend but neither provider nor rails. Its LIBFABRIC backend puts an address per
rail into the agent's metadata; the kind of address tells the provider. RDMA devices that a
process uses are among its open files.
"""

import os
import socket
from pathlib import Path
from typing import Any

_VERBS = "/dev/infiniband/uverbs"
_SYS_VERBS = Path("/sys/class/infiniband_verbs")


def transport_facts(backends: list[str], agent_metadata: bytes) -> dict[str, Any]:
    """Provider, rails and RDMA devices of the calling process.

    ``provider``: efa, tcp or verbs with LIBFABRIC; rdma or sockets with UCX (sockets also stands
    for shared memory); None when nothing tells.
    """
    devices = rdma_devices()
    if "LIBFABRIC" in backends:
        rails = libfabric_rails(agent_metadata)
        return {
            "provider": _libfabric_provider(rails, devices),
            "rails": len(rails) or None,
            "rdma_devices": devices,
        }
    if "UCX" in backends:
        return {
            "provider": "rdma" if devices else "sockets",
            "rails": len(devices) or None,
            "rdma_devices": devices,
        }
    return {"provider": None, "rails": None, "rdma_devices": devices}


def libfabric_rails(agent_metadata: bytes) -> list[bytes]:
    """The data endpoint's address of every rail, as NIXL's LIBFABRIC backend publishes them.

    Format (NIXL 1.4): fields of name, length (8 bytes, little endian), value and ``|``.
    """
    rails: list[bytes] = []
    while True:
        name = b"dest_data_ep_%d" % len(rails)
        at = agent_metadata.find(name)
        if at < 0:
            return rails
        at += len(name)
        length = int.from_bytes(agent_metadata[at : at + 8], "little")
        if not 0 < length <= 1024:
            return rails
        rails.append(agent_metadata[at + 8 : at + 8 + length])


def rdma_devices(process: Path = Path("/proc/self")) -> list[str]:
    """Names of the RDMA devices that a process has open, e.g. ``rdmap0s6``."""
    names = set()
    for entry in _entries(process / "fd"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(_VERBS):
            names.add(_device_name(target.rsplit("/", 1)[1]))
    return sorted(names)


def _libfabric_provider(rails: list[bytes], devices: list[str]) -> str | None:
    if not rails:
        return None
    family = int.from_bytes(rails[0][:2], "little")
    if family in (socket.AF_INET, socket.AF_INET6):
        # verbs has socket addresses too, but not without a device.
        return "verbs" if devices else "tcp"
    # EFA's address begins with a GID of the link-local prefix.
    return "efa" if rails[0][:2] == b"\xfe\x80" else None


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _device_name(verbs: str) -> str:
    try:
        return (_SYS_VERBS / verbs / "ibdev").read_text().strip()
    except OSError:
        return verbs
