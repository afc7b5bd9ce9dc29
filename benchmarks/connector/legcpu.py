"""CPU time and cores of a leg: of all processes of its session."""

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(leader: int) -> float:
    """User and system time of all live processes of a leg's session."""
    total = 0
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.getsid(int(entry)) == leader:
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def hold_to(leader: int, core: int) -> None:
    """Keep all threads of a leg's session on one core, whoever moved them."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.getsid(int(entry)) == leader:
                for thread in os.listdir(f"/proc/{entry}/task"):
                    os.sched_setaffinity(int(thread), {core})
