"""A real deployment whose legs are started wrong on purpose, and what pdctl doctor says of it.

A spec cannot say most of these faults: pdctl refuses them. So a leg is planned from a good spec,
changed, and started with pdctl's own launcher and state; `pdctl doctor` then sees a leg that was
started from something else than its spec, as it would on a node that somebody has touched.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from pdctl.conversation import Messages, new_client, stream_turn, user_text
from pdctl.launch import processes
from pdctl.launch.local import new_record, start
from pdctl.launch.probe import health_problem
from pdctl.launch.state import DeploymentState
from pdctl.launch.up import Phase, leg_statuses
from pdctl.plan import Deployment, Leg, Variable, plan
from pdctl.spec import load
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
PDCTL = Path(sys.executable).with_name("pdctl")

_FAILED = re.compile(r"ZMQError|NIXL_ERR_\w+|Engine core initialization failed")


class Faulty:
    """One prefill leg, one decode leg and a router, each started as told."""

    def __init__(self, folder: Path, changes: dict[str, Any] | None = None, fake: bool = False):
        os.environ["PDCTL_STATE_DIR"] = str(folder / "state")
        self.folder = folder
        self.spec_file = folder / "spec.yaml"
        prefill, decode, router, side_p, side_d = free_ports(5)
        spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/laptop.yaml").read_text())
        spec["name"] = f"doctor-{uuid.uuid4().hex[:6]}"
        spec["model"]["id"] = str(ROOT / ".cache/canary")
        spec["engine"] |= {"venv": None, "python": sys.executable}
        if fake:
            # The engines are tests/doctor/fake_leg.py; scripts and router are the real ones.
            spec["engine"]["python"] = str(_fake_python(folder))
            spec["router"]["python"] = sys.executable
            for role in ("prefill", "decode"):
                spec[role]["cpus"] = None
        spec["prefill"]["legs"][0] |= {"port": prefill, "side_channel_port": side_p}
        spec["decode"]["legs"][0] |= {"port": decode, "side_channel_port": side_d}
        spec["router"]["port"] = router
        for dotted, value in (changes or {}).items():
            section = spec
            *path, last = dotted.split(".")
            for part in path:
                section = section[part]
            section[last] = value
        self.spec = spec
        self.write()
        self.state = DeploymentState(spec["name"])
        # Legs that start at once would make it twice.
        self.state.folder.mkdir(parents=True)
        self.state.secret_file()
        self.client = new_client()

    def write(self) -> None:
        self.spec_file.write_text(yaml.safe_dump(self.spec, sort_keys=False))

    def plan(self, bidirectional: bool | None = None) -> Deployment:
        return plan(load(self.spec_file, bidirectional).spec, self.folder)

    def leg(self, name: str, bidirectional: bool | None = None) -> Leg:
        return next(leg for leg in self.plan(bidirectional).legs if leg.name == name)

    def start(self, leg: Leg, healthy: bool = True, seconds: float = 240.0) -> None:
        """Start a leg in the place of the one of its name.

        Args:
            healthy: wait until it is, else until it has ended or waits for ever.

        Raises:
            AssertionError: it did not become that in time.
        """
        self.stop(leg.name)
        record = new_record(leg, self.plan().bidirectional)
        start(self.state, leg, record)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = next(s for s in leg_statuses(self.state) if s.record.name == leg.name)
            if status.phase is Phase.HEALTHY:
                if healthy:
                    return
                raise AssertionError(f"{leg.name} is healthy")
            failed = status.phase is Phase.DEAD or status.fatal or self._has_failed(leg.name)
            if failed:
                if not healthy:
                    return
                raise AssertionError(f"{leg.name}: {status.detail} {status.fatal}")
            time.sleep(0.25)
        raise AssertionError(f"{leg.name}: not there after {seconds:g} s")

    def _has_failed(self, name: str) -> bool:
        """Whether the log shows an error after which the leg waits for ever."""
        log = self.state.log(name)
        return log.exists() and bool(_FAILED.search(log.read_text(errors="replace")))

    def stop(self, name: str) -> None:
        record = self.state.records().get(name)
        if record:
            processes.stop([record.launch_id], 10.0)

    def stop_all(self) -> None:
        for name in list(self.state.records()):
            self.stop(name)
        self.client.close()

    def turns(self, count: int, conversation: str | None = "", tokens: int = 8) -> None:
        """Turns of one conversation through the router; None: without naming it."""
        plan_ = self.plan()
        messages: Messages = []
        named = uuid.uuid4().hex if conversation == "" else conversation
        for number in range(count):
            text = user_text(f"{uuid.uuid4().hex}-{number}", 1500 if number == 0 else 200)
            messages.append({"role": "user", "content": text})
            if named is None:
                answer = self._anonymous(plan_, messages, tokens)
            else:
                answer = stream_turn(
                    self.client, plan_.router.url, plan_.served_name, messages, tokens, named
                ).text
            messages.append({"role": "assistant", "content": answer})

    def _anonymous(self, deployment: Deployment, messages: Messages, tokens: int) -> str:
        body = {"model": deployment.served_name, "messages": messages, "max_tokens": tokens,
                "temperature": 0}  # fmt: skip
        response = self.client.post(f"{deployment.router.url}/v1/chat/completions", json=body)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    def doctor(self, *words: str) -> Diagnosed:
        """What `pdctl doctor SPEC -o json` says."""
        begin = time.monotonic()
        done = subprocess.run(
            [str(PDCTL), "doctor", str(self.spec_file), "-o", "json", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        seconds = time.monotonic() - begin
        if done.returncode not in (0, 1):
            raise AssertionError(f"{done.returncode}\n{done.stdout}\n{done.stderr}")
        return Diagnosed(json.loads(done.stdout), done.returncode, seconds)


def _fake_python(folder: Path) -> Path:
    script = folder / "fake-python"
    leg = ROOT / "tests/doctor/fake_leg.py"
    script.write_text(
        f'#!/usr/bin/env bash\n[[ $1 == -c ]] && exec {sys.executable} "$@"\n'
        f'export PYTHONPATH={ROOT}\nexec {sys.executable} {leg} "$@"\n'
    )
    script.chmod(0o755)
    return script


@dataclass(frozen=True)
class Diagnosed:
    report: dict[str, Any]
    code: int
    seconds: float

    @property
    def findings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.report["findings"]
        return found

    def bad(self) -> list[str]:
        """Codes of errors and warnings, the first first."""
        return [each["code"] for each in self.findings if each["severity"] != "info"]


def with_env(leg: Leg, **variables: str) -> Leg:
    """The leg with these variables set."""
    kept = tuple(each for each in leg.env if each.name not in variables)
    new = tuple(Variable(name, value, "Set by a test.") for name, value in variables.items())
    return dataclasses.replace(leg, env=(*kept, *new))


def with_transfer(leg: Leg, **settings: Any) -> Leg:
    """The leg with other settings in its kv_connector_extra_config."""
    config = leg.kv_config
    extra = config["kv_connector_extra_config"] | settings
    return dataclasses.replace(leg, kv_config=config | {"kv_connector_extra_config": extra})


def with_config(leg: Leg, **settings: Any) -> Leg:
    """The leg with other settings in its kv-transfer-config; None takes one out."""
    config = {k: v for k, v in (leg.kv_config | settings).items() if v is not None}
    return dataclasses.replace(leg, kv_config=config)


def with_router(leg: Leg, **settings: Any) -> Leg:
    """The router with other settings in its config file."""
    return dataclasses.replace(leg, config=leg.config | settings)


def answers(url: str) -> bool:
    return health_problem(url) is None


def http(url: str) -> httpx.Response:
    return httpx.get(url, timeout=10, trust_env=False)


def names(found: list[dict[str, Any]]) -> Iterator[str]:
    """Codes of findings and of what they explain."""
    for each in found:
        yield each["code"]
        yield from names(each["consequences"])
