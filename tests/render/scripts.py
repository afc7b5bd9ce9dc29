"""Running rendered scripts with stand-ins for the programs they start."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cli import pdctl

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
FAKE = f"""#!{sys.executable} -IS
import json, os, sys
if sys.argv[1:2] == ["-c"]:
    sys.exit("pd_connector.check" not in sys.argv[2])
with open(os.environ["FAKE_OUTPUT"], "w") as out:
    json.dump([sys.argv, dict(os.environ)], out)
"""
"""Stands for vllm and python: writes down how it was started."""

SPEC: dict[str, Any] = {
    "name": "demo",
    "model": {"id": "org/model", "max_model_len": 4096},
    "kv_transfer": {"backend": "UCX"},
    "prefill": {"legs": [{"host": "10.0.0.1", "port": 8100}]},
    "decode": {"legs": [{"host": "10.0.0.2", "port": 8200}]},
}


@dataclass(frozen=True)
class Started:
    argv: list[str]
    """Program (its name alone) and arguments."""
    env: dict[str, str]

    def value(self, flag: str) -> str:
        assert self.argv.count(flag) == 1, f"{flag} in {self.argv}"
        return self.argv[self.argv.index(flag) + 1]

    def values(self, flag: str) -> list[str]:
        return [self.argv[at + 1] for at, word in enumerate(self.argv) if word == flag]

    @property
    def kv(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.value("--kv-transfer-config"))
        return config


def render(spec: Path | dict[str, Any], folder: Path, *options: str) -> dict[str, str]:
    """The rendered files by name; they lie in ``folder/out``."""
    if isinstance(spec, dict):
        path = folder / "spec.yaml"
        path.write_text(yaml.safe_dump(spec, allow_unicode=True), encoding="utf-8")
        spec = path
    out = folder / "out"
    ended = pdctl("render", spec, "-o", out, *options)
    assert ended.code == 0, ended.err
    files = {file.name: file.read_bytes().decode() for file in out.iterdir()}
    assert sorted(ended.out.splitlines()) == sorted(str(out / name) for name in files)
    return files


def run(folder: Path, name: str, *programs: str) -> Started:
    """Run ``folder/out/name`` with fake programs first on PATH (vllm and python when none are
    named; paths are below HOME, which is ``folder``)."""
    for program in programs or ("bin/vllm", "bin/python3"):
        path = folder / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE)
        path.chmod(0o755)
    output = folder / "started.json"
    env = {
        "PATH": f"{folder}/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "FAKE_OUTPUT": str(output),
        "LC_ALL": "C",
    }
    subprocess.run([folder / "out" / name], cwd=folder, env=env, check=True, timeout=60)
    (program, *argv), environment = json.loads(output.read_text())
    output.unlink()
    return Started([os.path.basename(program), *argv], environment)
