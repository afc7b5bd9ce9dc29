"""Collecting evidence of a deployment into a folder laid out as a bundle.

What is asked over HTTP is asked of every leg, wherever it runs. Processes, environments, logs and
the facts of a node are read on the node that runs ``pdctl collect`` or ``pdctl doctor``; other
nodes are gaps.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from pdctl.doctor.evidence import redact
from pdctl.doctor.evidence.answers import ask, reach, scrapes, write_metrics
from pdctl.doctor.evidence.folder import write
from pdctl.doctor.evidence.processes import (
    Collected,
    planned_words,
    process_of,
    write_leg,
    write_model,
    write_nodes,
    write_settings,
)
from pdctl.doctor.model import DEPLOYMENT
from pdctl.launch.state import DeploymentState
from pdctl.launch.up import leg_statuses
from pdctl.plan import Deployment, Leg

BETWEEN_SCRAPES_SECONDS = 1.0


Say = Callable[[str], None]


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
    write(folder, "bundle.yaml", yaml.safe_dump(_head(deployment), sort_keys=False))
    write(folder, f"{DEPLOYMENT}/spec.yaml", _spec(spec_text))
    with ThreadPoolExecutor(16) as pool:
        say("asking the legs")
        first = pool.submit(scrapes, deployment)
        asked = pool.submit(ask, deployment, folder)
        reached = pool.submit(reach, deployment, folder)
        say("looking at this node")
        process = {leg.name: process_of(statuses.get(leg.name)) for leg in local}
        for leg in local:
            write_leg(deployment, leg, statuses.get(leg.name), process[leg.name], state, found)
        write_nodes(deployment, local, process, folder)
        asked.result()
        reached.result()
        begun, scraped = first.result()
        time.sleep(max(0.0, BETWEEN_SCRAPES_SECONDS - (time.monotonic() - begun)))
        say("asking for metrics again")
        write_metrics(folder, scraped, scrapes(deployment)[1])
    write_model(deployment, folder, process.values())
    write(folder, "gaps.txt", "\n".join(found.gaps))
    return found


def collect_planned(deployment: Deployment, spec_text: str, folder: Path) -> None:
    """What can be known before anything is started: the plan, and this node for its legs."""
    write(folder, "bundle.yaml", yaml.safe_dump(_head(deployment), sort_keys=False))
    write(folder, f"{DEPLOYMENT}/spec.yaml", _spec(spec_text))
    local = [leg for leg in deployment.engines if _is_local(leg)]
    for leg in local:
        planned = {variable.name: variable.value for variable in leg.env}
        write_settings(folder, leg, planned, planned_words(leg), leg.config or None)
    write_nodes(deployment, local, dict.fromkeys([leg.name for leg in local]), folder)
    write_model(deployment, folder, ())


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
