"""A deployment that the fault table breaks: legs with changed scripts, and legs started again."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time

import httpx
from tests.e2e import legs
from tests.e2e.conftest import Deployment

from pd_connector import contract
from pdctl.conversation import user_text

HANGS = 30.0
"""Seconds without an answer that count as hanging: a turn takes one or two."""
FIRST = 240.0
"""Seconds for the first turn of a start."""


def start(
    deployment: Deployment, model: str, leg: str | None = None, script: dict[str, str] | None = None
) -> None:
    """The pair with this model; one leg may run a script with these changes (pattern: text)."""
    deployment.spec["model"]["id"] = model
    deployment.write()
    stop_changed()
    shutil.rmtree(deployment.folder / "changed", ignore_errors=True)
    deployment.pdctl("up", "SPEC", "--bidir", "on")
    if leg:
        start_changed(deployment, leg, script or {})
    warm_up(deployment)


def warm_up(deployment: Deployment) -> None:
    """First prompts and the handshakes of both directions take longer than any hang."""
    deployment.client.timeout = httpx.Timeout(FIRST)
    history = user_text(f"warm {time.monotonic()}", 300)
    with contextlib.suppress(KeyError, AssertionError):
        answer, _, handle = legs.turn(deployment, history)
        if not CHANGED:
            legs.turn(deployment, history + answer + " go on", handle)
    deployment.client.timeout = httpx.Timeout(HANGS)


CHANGED: list[subprocess.Popen[bytes]] = []
"""A leg that runs a changed script, which pdctl would not start."""


def start_changed(deployment: Deployment, leg: str, changes: dict[str, str]) -> None:
    """Put a leg with a changed start script in the place of pdctl's."""
    folder = deployment.folder / "changed"
    if not folder.is_dir():
        deployment.pdctl("render", "SPEC", "--bidir", "on", "-o", str(folder))
        script = folder / f"{leg}-0.sh"
        text = script.read_text()
        for pattern, new in changes.items():
            text = re.sub(pattern, new, text)
        script.write_text(text)
        os.killpg(deployment.status()[f"{leg}-0"]["pid"], signal.SIGKILL)
        time.sleep(1)
    secret = deployment.folder / "state" / deployment.name / "secret"
    CHANGED.append(
        subprocess.Popen(
            ["bash", str(folder / f"{leg}-0.sh")],
            stdout=(deployment.folder / "changed.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {contract.SECRET_FILE_VARIABLE: str(secret)},
        )
    )
    while not healthy(deployment, getattr(deployment, f"{leg}_url")):
        time.sleep(1)


def stop_changed() -> None:
    for process in CHANGED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    CHANGED.clear()


def heal(deployment: Deployment, needs: list[str]) -> None:
    """Restart the engines that an earlier fault broke, when a needed one is among them."""
    if CHANGED or all(healthy(deployment, getattr(deployment, f"{leg}_url")) for leg in needs):
        return
    for leg in deployment.status().values():
        # What is broken may look healthy to pdctl.
        if leg["name"] != "router-0" and leg["pid"] and not healthy(deployment, leg["url"]):
            os.killpg(leg["pid"], signal.SIGKILL)
    time.sleep(1)
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def healthy(deployment: Deployment, url: str) -> bool:
    return legs.healthy(deployment, url)
