"""Ports that nothing else takes between being picked and being listened on."""

import random
import socket

# Below Linux's ephemeral range (32768 and up), from which every other socket here is given one.
_RANGE = range(20000, 32000)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now, all different."""
    found: list[int] = []
    for port in random.sample(_RANGE, len(_RANGE)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} ports are free in {_RANGE}")
