"""Starting legs as detached processes on this machine."""

import errno
import os
import socket
import subprocess
import time
import uuid

from pdctl.errors import PdctlError
from pdctl.launch.processes import MARK
from pdctl.launch.state import DeploymentState, LegRecord
from pdctl.plan import Leg
from pdctl.render import render_leg


def start(state: DeploymentState, leg: Leg, bidirectional: bool) -> LegRecord:
    """Start a leg in a session of its own; its output goes to its log.

    Raises:
        PdctlError: the log or the record cannot be written.
    """
    record = LegRecord(leg.name, leg.role, leg.url, bidirectional, uuid.uuid4().hex, time.time())
    try:
        state.write(record, render_leg(leg))
        with state.rotate_log(leg.name).open("wb") as log:
            subprocess.Popen(
                ["bash", str(state.script(leg.name))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=state.folder,
                env={**os.environ, MARK: record.launch_id},
                start_new_session=True,
            )
    except OSError as error:
        raise PdctlError(f"{leg.name}: cannot be started: {error}") from None
    return record


def check_addresses(legs: list[Leg]) -> None:
    """Make sure that every leg can listen where it is to.

    Raises:
        PdctlError: an address is not this machine's, or a port is taken.
    """
    problems = []
    for leg in legs:
        for port in leg.ports:
            problem = _cannot_listen(leg.bind, port)
            if problem == errno.EADDRNOTAVAIL:
                problems.append(
                    f"{leg.name}: {leg.bind} is not an address of this machine; use "
                    "'pdctl render' and run the script on its own node"
                )
                break
            if problem == errno.EADDRINUSE:
                problems.append(
                    f"{leg.name}: port {port} on {leg.bind} is taken by another process"
                    f"{_owner(port)}; stop it or change the port in the spec"
                )
            elif problem:
                problems.append(
                    f"{leg.name}: cannot listen on {leg.bind}:{port}: {os.strerror(problem)}"
                )
    if problems:
        raise PdctlError("\n".join(problems))


def _cannot_listen(host: str, port: int) -> int:
    """0, or the errno of listening there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _owner(port: int) -> str:
    """`` (pid 12: command)`` of the process that listens, when it can be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        # Columns of proc_net_tcp(5): 1 local address, 3 state (0A is LISTEN), 9 inode.
        inodes |= {
            row[9] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port
        }
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            if any(f"socket:[{inode}]" in links for inode in inodes):
                with open(f"/proc/{pid}/cmdline", "rb") as command:
                    words = command.read(400).replace(b"\0", b" ").decode(errors="replace")
                return f" (pid {pid}: {words.strip()[:80]})"
        except OSError:
            continue
    return ""
