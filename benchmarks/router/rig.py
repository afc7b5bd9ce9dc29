"""Processes of a measurement: engines, routers, and what they cost."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children that still run."""
    total = 0
    for task in [pid, *_children(pid)]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(c) for c in children] + [d for c in children for d in _children(int(c))]
    return []


@contextlib.contextmanager
def process(command: list[str], env: dict[str, str] | None = None) -> Iterator[Any]:
    log = subprocess.DEVNULL if not os.environ.get("BENCH_LOG") else None
    started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {})})
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(15)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_for(url: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            if time.monotonic() > end:
                raise SystemExit(f"{url} does not answer") from None
            time.sleep(0.1)


def engine(port: int, *pace: str) -> list[str]:
    """The command of a fake engine."""
    return [sys.executable, str(HERE / "fake_paced_engine.py"), "--port", str(port), *pace]


def pd_router(folder: Path, port: int, legs: list[tuple[str, str]], **settings: Any) -> list[str]:
    """The command of a pd-router; its config file goes to ``folder``."""
    config: dict[str, Any] = {"name": "bench", "host": "127.0.0.1", "port": port, **settings}
    for number, (role, url) in enumerate(legs):
        config.setdefault(role, {})[f"{role}-{number}"] = {"url": url}
    path = folder / f"router-{port}.json"
    path.write_text(json.dumps(config))
    return [sys.executable, "-m", "pd_router", "--config", str(path)]


def bare_proxy(port: int, legs: list[tuple[str, str]]) -> list[str]:
    command = [sys.executable, str(HERE / "bare_proxy.py"), "--port", str(port)]
    for role, url in legs:
        command += [f"--{role}", url]
    return command


def rust_router(folder: str, port: int, metrics: int, legs: list[tuple[str, str]]) -> list[str]:
    command = [sys.executable, str(Path(folder) / "bin" / "vllm-router")]
    command += ["--vllm-pd-disaggregation", "--policy", "round_robin", "--kv-connector", "nixl"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    for role, url in legs:
        command += [f"--{role}", url]
    return command
