"""Starting legs as detached processes on this machine."""

import errno
import os
import socket
import subprocess
import time
import uuid

from pd_connector.contract import SECRET_FILE_VARIABLE
from pdctl.errors import PdctlError
from pdctl.launch.processes import MARK, find
from pdctl.launch.state import DeploymentState, LegRecord
from pdctl.plan import Leg
from pdctl.render import leg_files


def new_record(leg: Leg, bidirectional: bool) -> LegRecord:
    """The record of a start that is about to happen."""
    return LegRecord(
        leg.name, leg.role, leg.url, bidirectional, uuid.uuid4().hex, time.time(), leg.grace
    )


def start(state: DeploymentState, leg: Leg, record: LegRecord) -> None:
    """Start a leg in a session of its own; its output goes to its log.

    Raises:
        PdctlError: the log or the record cannot be written.
    """
    try:
        state.write(record, leg_files(leg))
        run_script(state, record, _secret(state))
    except OSError as error:
        raise PdctlError(f"{leg.name}: cannot be started: {error}") from None


def run_script(state: DeploymentState, record: LegRecord, env: dict[str, str]) -> None:
    """Start the script of a record in a session of its own, with ``env`` besides this process's
    environment; its output goes to its log."""
    with state.rotate_log(record.name).open("wb") as log:
        subprocess.Popen(
            ["bash", str(state.script(record.name))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=state.folder,
            env={**os.environ, **env, MARK: record.launch_id},
            start_new_session=True,
        )


def _secret(state: DeploymentState) -> dict[str, str]:
    """Where legs find the deployment's secret, unless the spec or the caller says where."""
    if os.environ.get(SECRET_FILE_VARIABLE):
        return {}
    return {SECRET_FILE_VARIABLE: str(state.secret_file())}


def check_addresses(legs: list[Leg], own: list[str]) -> None:
    """Make sure that every leg can listen where it is to.

    Args:
        own: launch ids of processes that will be stopped first; the ports they hold are free.

    Raises:
        PdctlError: an address is not this machine's, or a port is taken.
    """
    problems = []
    ours = {pid for pids in find(own).values() for pid in pids}
    for leg in legs:
        if missing := _missing_cpus(leg.cpus):
            problems.append(
                f"{leg.name}: cpus {leg.cpus}: this machine lets us use no core {missing}; "
                "change cpus in the spec"
            )
        for address, port in leg.listens:
            problem = cannot_listen(address, port)
            if problem == errno.EADDRNOTAVAIL:
                problems.append(
                    f"{leg.name}: {address} is not an address of this machine; use "
                    "'pdctl render' and run the script on its own node"
                )
                break
            owner, described = port_owner(port) if problem == errno.EADDRINUSE else (None, "")
            if owner in ours:
                continue
            if problem == errno.EADDRINUSE:
                problems.append(
                    f"{leg.name}: port {port} on {address} is taken by another process"
                    f"{described}; stop it or change the port in the spec"
                )
            elif problem:
                problems.append(
                    f"{leg.name}: cannot listen on {address}:{port}: {os.strerror(problem)}"
                )
    if problems:
        raise PdctlError("\n".join(problems))


def cannot_listen(host: str, port: int) -> int:
    """0, or the errno of listening there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (socket.gaierror, UnicodeError):
        # UnicodeError: a name that no resolver would take, such as one with an empty label.
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _missing_cpus(cpus: str) -> str:
    """Cores of a taskset list that this process may not use, as text."""
    wanted: set[int] = set()
    for part in filter(None, cpus.split(",")):
        first, _, last = part.partition("-")
        wanted |= set(range(int(first), int(last or first) + 1))
    return ", ".join(map(str, sorted(wanted - os.sched_getaffinity(0))))


def port_owner(port: int) -> tuple[int | None, str]:
    """Pid of who listens on a port, and `` (pid 12: command)``, when it can be seen."""
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
                return int(pid), f" (pid {pid}: {words.strip()[:80]})"
        except OSError:
            continue
    return None, ""
