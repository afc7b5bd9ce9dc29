"""Prometheus and Alertmanager as plain processes of this machine."""

import errno
import hashlib
import os
import shlex
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from pdctl.errors import PdctlError
from pdctl.launch.local import cannot_listen, port_owner, run_script
from pdctl.launch.processes import alive, find, stop
from pdctl.launch.state import DeploymentState, LegRecord
from pdctl.observe.stack import (
    alertmanager_config,
    alertmanager_flags,
    alertmanager_url,
    prometheus_files,
    prometheus_flags,
    prometheus_url,
)
from pdctl.plan import Deployment
from pdctl.render import File
from pdctl.spec.model import Spec

ROLE = "observability"
_PROGRAMS = {
    "prometheus": ("prometheus",),
    "alertmanager": ("prometheus-alertmanager", "alertmanager"),
}
"""By what each is called: Debian renames Alertmanager."""
_READY_SECONDS = 60.0
_POLL_SECONDS = 0.1
_CLOSING_SECONDS = 5.0


@dataclass(frozen=True)
class Watcher:
    """One program and how it is started."""

    name: str
    url: str
    command: tuple[str, ...]


def watch_state(deployment: str) -> DeploymentState:
    """Where the processes that watch a deployment are remembered: apart from its legs."""
    return DeploymentState(f"{deployment}/observe")


def start(spec: Spec, deployment: Deployment) -> Iterator[str]:
    """Start what does not run, restart what has changed; a line for each.

    Raises:
        PdctlError: a program is not installed or does not get ready.
    """
    paths = _programs()
    state = watch_state(deployment.name)
    with state.lock():
        watchers = _prepare(spec, deployment, state.folder, paths)
        for watcher in watchers:
            yield _start(state, watcher)
        for watcher in watchers:
            _wait(state, watcher)


def end(deployment: str, grace: float) -> Iterator[str]:
    """Stop what :func:`start` started; a line for each."""
    state = watch_state(deployment)
    if not state.folder.exists():
        return
    with state.lock():
        for record in state.records().values():
            left = stop([record.launch_id], grace)
            if left:
                raise PdctlError(f"{record.name}: still runs: {' '.join(map(str, left))}")
            state.forget(record.name)
            yield f"{record.name}: stopped"


def _programs() -> dict[str, str]:
    found = {
        name: next(filter(None, map(shutil.which, names)), None)
        for name, names in _PROGRAMS.items()
    }
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise PdctlError(
            f"{' and '.join(missing)} not installed here (Debian: apt install prometheus "
            "prometheus-alertmanager); or run the compose.yaml of 'pdctl observe render'",
            2,
        )
    return {name: path for name, path in found.items() if path}


def _prepare(
    spec: Spec, deployment: Deployment, folder: Path, paths: dict[str, str]
) -> list[Watcher]:
    """Write the configuration; what to start with it."""
    config = folder / "config"
    shutil.rmtree(config / "consoles", ignore_errors=True)
    files = [
        *prometheus_files(spec, deployment, _router_certificate(deployment)),
        ("alertmanager.yml", alertmanager_config(spec, deployment)),
    ]
    (config / "consoles").mkdir(parents=True, exist_ok=True)
    for name, text in files:
        (config / name).write_text(text, encoding="utf-8")
    return [
        Watcher(
            "alertmanager",
            alertmanager_url(spec),
            (
                paths["alertmanager"],
                *alertmanager_flags(spec, str(config), str(folder / "alertmanager-data")),
            ),
        ),
        Watcher(
            "prometheus",
            prometheus_url(spec),
            (
                paths["prometheus"],
                *prometheus_flags(spec, str(config), str(folder / "prometheus-data")),
            ),
        ),
    ]


def _router_certificate(deployment: Deployment) -> str | None:
    """The file of the router's own certificate, where it is on this machine."""
    tls = deployment.router.config["tls"]
    path = Path(tls["certificate"]).expanduser() if tls else None
    return str(path) if path and path.is_file() else None


def _start(state: DeploymentState, watcher: Watcher) -> str:
    digest = _digest(state.folder / "config")
    script = File(
        f"{watcher.name}.sh",
        f"#!/bin/sh\n# Configuration {digest}\nexec {shlex.join(watcher.command)}\n",
    )
    record = state.records().get(watcher.name)
    running = record is not None and alive(find([record.launch_id])[record.launch_id])
    if running and state.holds([script]):
        return f"{watcher.name}: runs already, {watcher.url}"
    if record:
        stop([record.launch_id], grace=10.0)
    _check_port(watcher, _CLOSING_SECONDS if record else 0.0)
    record = LegRecord(watcher.name, ROLE, watcher.url, False, uuid.uuid4().hex, time.time())
    state.write(record, [script])
    run_script(state, record, {})
    return f"{watcher.name}: {'restarted' if running else 'started'}, {watcher.url}"


def _check_port(watcher: Watcher, patience: float) -> None:
    """Another's answers must not be taken for ours.

    Args:
        patience: seconds in which a process that has just ended may close its sockets.
    """
    url = urlsplit(watcher.url)
    assert url.hostname is not None and url.port is not None
    deadline = time.monotonic() + patience
    while (problem := cannot_listen(url.hostname, url.port)) == errno.EADDRINUSE:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    if problem == errno.EADDRINUSE:
        _, who = port_owner(url.port)
        raise PdctlError(
            f"{watcher.name}: port {url.port} on {url.hostname} is taken by another process{who}; "
            f"stop it or change observability.stack.{watcher.name}_port"
        )
    if problem:
        raise PdctlError(
            f"{watcher.name}: cannot listen on {url.hostname}:{url.port}: {os.strerror(problem)}; "
            "change observability.stack.host"
        )


def _digest(folder: Path) -> str:
    """Of all configuration files: a change in one restarts."""

    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _wait(state: DeploymentState, watcher: Watcher) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    record = state.records()[watcher.name]
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while True:
            try:
                if client.get(f"{watcher.url}/-/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if not alive(find([record.launch_id])[record.launch_id]):
                raise PdctlError(f"{watcher.name} ended: {_last_line(state.log(watcher.name))}")
            if time.monotonic() > deadline:
                raise PdctlError(
                    f"{watcher.name} is not ready after {_READY_SECONDS:g} s; see "
                    f"{state.log(watcher.name)}"
                )
            time.sleep(_POLL_SECONDS)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else f"{log} is empty"
