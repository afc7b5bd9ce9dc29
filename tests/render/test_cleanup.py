"""cleanup.sh: stops what its deployment's scripts started, and nothing else."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.render.scripts import SPEC, render

STUBBORN = f"""#!{sys.executable} -IS
import os, signal, sys, time
if sys.argv[1:2] == ["-c"]:
    sys.exit(0)
folder = os.environ["FAKE_FOLDER"]
child = os.fork()
if child == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
name = "child" if child == 0 else "parent"
with open(folder + "/" + name + ".new", "w") as out:
    out.write(str(os.getpid()))
os.rename(folder + "/" + name + ".new", folder + "/" + name)
while True:
    time.sleep(1)
"""
"""An engine whose child leaves its session and ignores SIGTERM."""

WAIT_SECONDS = 60

Start = Callable[[str, str], list[int]]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but is not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a leg of a deployment: the pids of the engine and its child."""
    pids: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def start_leg(deployment: str, leg: str) -> list[int]:
        folder = tmp_path / deployment / leg
        folder.mkdir(parents=True)
        render({**SPEC, "name": deployment}, tmp_path / deployment)
        for program in ("vllm", "python3"):
            path = folder / program
            path.write_text(STUBBORN)
            path.chmod(0o755)
        env = {"PATH": f"{folder}:/usr/bin:/bin", "FAKE_FOLDER": str(folder)}
        script = tmp_path / deployment / "out" / f"{leg}.sh"
        processes.append(subprocess.Popen([script], env=env, start_new_session=True))
        started = [wait_for_pid(folder / name) for name in ("parent", "child")]
        pids.extend(started)
        return started

    yield start_leg
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait(WAIT_SECONDS)


def wait_for_pid(path: Path) -> int:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)
    return int(path.read_text())


def cleanup(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "out" / "cleanup.sh", *args],
        env={"PATH": "/usr/bin:/bin", "GRACE_SECONDS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )


@pytest.mark.parametrize("args", [(), ("all",), ("prefill-0",), ("",)])
def test_wrong_use(args: tuple[str, ...], tmp_path: Path) -> None:
    render(SPEC, tmp_path)
    ended = cleanup(tmp_path, *args)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "usage: cleanup.sh router|server\n"


@pytest.mark.parametrize("what", ["router", "server"])
def test_nothing_runs(what: str, tmp_path: Path) -> None:
    render({**SPEC, "name": "never-started"}, tmp_path)
    ended = cleanup(tmp_path, what)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"nothing of never-started ({what}) runs here\n"


def test_server_stops_an_engine_and_its_stubborn_child_and_no_other(
    start: Start, tmp_path: Path
) -> None:
    prefill, decode = start("demo-a", "prefill-0"), start("demo-a", "decode-0")
    other, longer = start("demo-b", "prefill-0"), start("demo-a-2", "prefill-0")
    router = start("demo-a", "router-0")

    ended = cleanup(tmp_path / "demo-a", "server")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "stopping demo-a/prefill-0 demo-a/decode-0\nstopped\n"
    assert not any(map(alive, prefill + decode))
    assert all(map(alive, other + longer + router))

    assert cleanup(tmp_path / "demo-a", "router").stdout == "stopping demo-a/router-0\nstopped\n"
    assert not any(map(alive, router))
    assert all(map(alive, other + longer))
    assert "nothing of demo-a (server) runs here" in cleanup(tmp_path / "demo-a", "server").stdout


def test_processes_that_only_mention_the_mark_are_left_alone(start: Start, tmp_path: Path) -> None:
    (engine, child) = start("demo-c", "prefill-0")
    marks = {"NOTE": "PDCTL_LEG=demo-c/prefill-0", "PDCTL_LEG": "demo-c/prefill-0x"}
    sleeper = subprocess.Popen(["/bin/sleep", "600"], env=marks)
    try:
        assert cleanup(tmp_path / "demo-c", "server").returncode == 0
        assert not alive(engine)
        assert not alive(child)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait(WAIT_SECONDS)


def test_a_router_has_time_for_its_drain(tmp_path: Path) -> None:
    render({**SPEC, "router": {"drain_timeout": "45500ms"}}, tmp_path)
    script = (tmp_path / "out" / "cleanup.sh").read_text()
    assert re.findall(r"grace=(\d+) ;;", script) == ["56", "20"]
