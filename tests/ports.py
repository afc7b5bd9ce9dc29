"""Ports that nothing else takes between being picked and being listened on."""

import itertools
import os
import random
import socket

# Below Linux's ephemeral range (32768 and up), from which every other socket here is given one.
_ALL = range(20000, 32000)


def _own() -> range:
    """The part that no other worker of this run (pytest-xdist) picks from."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = len(_ALL) // workers
    return _ALL[number * share : (number + 1) * share]


_OWN = _own()
_next = itertools.cycle(random.sample(_OWN, len(_OWN)))


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now, all different.

    None comes twice before all have come: what was said on a port lingers for a minute.
    """
    found: list[int] = []
    for port in itertools.islice(_next, len(_OWN)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} ports are free in {_OWN}")
