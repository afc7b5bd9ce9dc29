"""Finding and stopping the processes of a leg.

A leg and all that it starts carry the environment variable ``PDCTL_LAUNCH`` with an id made for
that one start. A process is ours if and only if ``/proc/PID/environ`` holds it: a pid that was
given to another program is never taken for a leg, and an orphan is still found.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MARK = "PDCTL_LAUNCH"
_KILL_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.1
_EXEC_POLLS = 20
_EXEC_POLL_SECONDS = 0.01


def find(launch_ids: Iterable[str]) -> dict[str, list[int]]:
    """Living processes of each start, the first one (the leg itself) first."""
    wanted = {f"{MARK}={launch_id}".encode(): launch_id for launch_id in launch_ids}
    for _ in range(_EXEC_POLLS):
        found, settled = _scan(wanted)
        if settled:
            break
        time.sleep(_EXEC_POLL_SECONDS)
    for pids in found.values():
        pids.sort(key=lambda pid: (not _leads_session(pid), pid))
    return found


def _scan(wanted: dict[bytes, str]) -> tuple[dict[str, list[int]], bool]:
    """One look at all processes, and whether none of them was amid an exec.

    In the middle of an exec a process shows an empty environment for a moment.
    """
    found: dict[str, list[int]] = {launch_id: [] for launch_id in wanted.values()}
    settled = True
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path("/proc", entry, "environ").read_bytes()
            if not environ and os.readlink(f"/proc/{entry}/exe"):
                settled = False
        except OSError:
            # It has ended, is another user's, or is a kernel thread or a zombie (no exe).
            continue
        for variable in environ.split(b"\0"):
            if variable in wanted:
                found[wanted[variable]].append(int(entry))
                break
    return found, settled


def alive(pids: list[int]) -> bool:
    """Whether the leg itself runs, not only something it left behind."""
    return bool(pids) and _leads_session(pids[0])


def stop(
    launch_ids: list[str], grace: float, report: Callable[[str], None] = lambda _: None
) -> list[int]:
    """Ask the processes to end, then end them.

    Args:
        grace: seconds between SIGTERM and SIGKILL.
        report: called with a line when force is needed.

    Returns:
        Pids that are still there.
    """
    pids = _all(launch_ids)
    _send(pids, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (pids := _all(launch_ids)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if pids:
        report(f"still running after {grace:g} s, killing: {' '.join(map(str, pids))}")
    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    while pids and time.monotonic() < deadline:
        _send(pids, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        pids = _all(launch_ids)
    return pids


def _all(launch_ids: list[str]) -> list[int]:
    return [pid for pids in find(launch_ids).values() for pid in pids]


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
