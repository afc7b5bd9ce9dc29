"""Deployments of real pdctl scripts and a real router over fake engines, each in its own place."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_ports

PDCTL = Path(sys.executable).with_name("pdctl")
FAKE_ENGINE = Path(__file__).parents[1] / "fake_engine.py"

# Stands where the spec's engine.python is: it lets the scripts' import check pass and starts a
# fake engine in place of vLLM's server. FAKE_* variables make it misbehave.
FAKE_PYTHON = f"""#!/usr/bin/env bash
if [[ "$1" == -c ]]; then exit 0; fi
role=decode
for word in "$@"; do
  [[ "$word" == *kv_producer* ]] && role=prefill
  [[ "$previous" == --port ]] && port="$word"
  previous="$word"
done
case "${{FAKE_START:-}}" in
  fail)
    echo "INFO 11-29 12:00:00 [api_server.py:1] loading"
    echo "(EngineCore pid=9) ERROR 11-29 12:00:00 [core.py:1] ValueError: no room for the KV cache"
    echo "RuntimeError: Engine core initialization failed. See root cause above."
    exit 1 ;;
  no-side-channel)
    echo "(EngineCore pid=9) zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5600')"
    exec sleep 1000 ;;
  hang) exec sleep 1000 ;;
  stubborn)
    trap '' TERM
    setsid bash -c 'trap "" TERM; while :; do sleep 1; done' &
    {sys.executable} {FAKE_ENGINE} --role "$role" --port "$port" &
    while :; do sleep 1; done ;;
esac
exec {sys.executable} {FAKE_ENGINE} --role "$role" --port "$port"
"""


class Place:
    """A state folder and a spec of fake engines in it, by default of a name that no other run on
    this machine has: tests look for processes by it."""

    def __init__(self, folder: Path, name: str = ""):
        self.folder = folder
        self.name = name = name or f"fakes-{uuid.uuid4().hex[:6]}"
        self.spec_file = folder / f"{name}.yaml"
        python = folder / "fake-python"
        python.write_text(FAKE_PYTHON)
        python.chmod(0o755)
        ports = free_ports(5)
        self.spec: dict[str, Any] = {
            "name": name,
            "model": {"id": "fake", "max_model_len": 8192},
            "engine": {"device": "cpu", "python": str(python)},
            "kv_transfer": {"backend": "UCX"},
            "prefill": {"legs": [leg(ports[0], ports[1])]},
            "decode": {"legs": [leg(ports[2], ports[3])]},
            "router": {"port": ports[4], "python": sys.executable},
        }
        self.write()

    def write(self) -> None:
        self.spec_file.write_text(yaml.safe_dump(self.spec))

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"PDCTL_STATE_DIR": str(self.folder / "state")}

    def command(self, *words: str) -> list[str]:
        return [str(PDCTL), *(str(self.spec_file) if w == "SPEC" else w for w in words)]

    def pdctl(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, env=self.env, check=False
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Run pdctl beside the test. Ctrl-C reaches it even where a shell put the tests into the
        background, which would have it ignored."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
        )

    def legs(self) -> dict[str, dict[str, Any]]:
        done = subprocess.run(
            self.command("status", self.name, "--json"),
            capture_output=True,
            text=True,
            env=self.env,
            check=False,
        )
        return {leg["name"]: leg for leg in json.loads(done.stdout)["legs"]}

    def pids(self) -> dict[str, int]:
        return {name: leg["pid"] for name, leg in self.legs().items()}


def leg(port: int, side_channel: int) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": port, "side_channel_port": side_channel}


def running(mark: str) -> list[int]:
    """Pids whose environment holds ``mark``."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for pid in running(f"PDCTL_STATE_DIR={place.folder / 'state'}"):
        os.kill(pid, signal.SIGKILL)
