"""Running somebody else's client against a URL and keeping what it reports as rows."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pd_connector import telemetry
from pdctl.bench.adapters import aiperf, multiturn
from pdctl.bench.client import Target
from pdctl.bench.environment import environment
from pdctl.bench.records import SCHEMA, Row, RunFolder
from pdctl.errors import PdctlError

Say = Callable[[str], None]

LOG = "output.log"
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Foreign:
    """What to ask of the other client. ``lengths``: tokens of a turn's new text."""

    client: str
    arm: str
    target: Target
    program: Path | None
    tokenizer: Path | None
    conversations: int
    turns: int
    new_tokens: int
    answer_tokens: int
    concurrency: int
    seed: str
    trace: Path | None
    command: str


def run_foreign(asked: Foreign, out: RunFolder, say: Say) -> None:
    """Run it to its end.

    Raises:
        PdctlError: it is not installed, or it fails; its output stays in the run's folder.
    """
    make = {"aiperf": aiperf.command, "multiturn": multiturn.command}[asked.client]
    read = {"aiperf": aiperf.rows, "multiturn": multiturn.rows}[asked.client]
    settings = _settings(asked)
    out.create(settings, None)
    out.write_environment(environment([]))
    work = (out.folder / asked.client).absolute()
    work.mkdir()
    state = "failed"
    try:
        command = make(asked, work)
        say(f"running {asked.client}")
        before = outcomes(asked.target.url)
        _execute(command, work, asked.client)
        after = outcomes(asked.target.url)
        found: list[Row] = read(work, asked.arm)
        measured = [row for row in found if not row.warmup]
        if not measured:
            raise PdctlError(f"{asked.client} reported no request; its output: {work / LOG}")
        for row in found:
            out.add_row(row)
        settings = settings | {"router_outcomes": _gained(before, after)}
        settings["workload"] |= {
            "turns": len(measured),
            "conversations": len({row.conversation for row in measured}),
        }
        state = "complete"
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    finally:
        out.write_settings(settings | {"state": state})
        out.close()


def _execute(command: list[str], work: Path, name: str) -> None:
    """Run it in a process group of its own, so that none of its processes outlives this one."""
    with (work / LOG).open("wb") as stream:
        try:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, cwd=work, start_new_session=True
            )
        except OSError as error:
            raise PdctlError(
                f"{command[0]}: {error.strerror}; --program says where it is", 2
            ) from None
    try:
        code = process.wait()
    finally:
        _end(process)
    if code:
        raise PdctlError(f"{name} ended with {code}; its output: {work / LOG}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Whatever of its group still runs is asked to end, and then made to."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _gained(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {
        name: after[name] - before.get(name, 0)
        for name in after
        if after[name] != before.get(name, 0)
    }


def _settings(asked: Foreign) -> dict[str, Any]:
    load = {"concurrency": asked.concurrency, "rate": None}
    return {
        "schema": SCHEMA,
        "id": uuid.uuid4().hex[:12],
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "state": "running",
        "spec": None,
        "client": asked.client,
        "command": asked.command,
        "arms": [{"name": asked.arm, "url": asked.target.url}],
        "repeats": 1,
        "rounds": 1,
        "seed": asked.seed,
        "endpoint": "chat",
        "workload": {
            "kind": asked.client,
            "conversations": asked.conversations,
            "turns": asked.conversations * asked.turns,
            "load": load,
        },
    }


def outcomes(url: str) -> dict[str, int]:
    """Turns by outcome as pdctl's router counts them; empty for other routers."""
    try:
        response = httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False)
        families = list(text_string_to_metric_families(response.text))
    except (httpx.HTTPError, ValueError):
        return {}
    counted: dict[str, int] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == telemetry.ROUTER_TURNS.name and "outcome" in sample.labels:
                name = sample.labels["outcome"]
                counted[name] = counted.get(name, 0) + int(sample.value)
    return counted
