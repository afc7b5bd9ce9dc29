"""What the legs answer over HTTP, and whether their ports take connections."""

from __future__ import annotations

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from pd_connector import contract
from pdctl.doctor.evidence import redact, web
from pdctl.doctor.evidence.folder import write
from pdctl.doctor.evidence.metrics import SCRAPE_SEPARATOR
from pdctl.plan import Deployment, Leg

CONNECT_SECONDS = 2.0


ENGINE_PATHS = ("/health", "/version", "/v1/models", "/server_info?config_format=json")


ROUTER_PATHS = ("/health", f"{contract.ADMIN_PATH}/legs", f"{contract.ADMIN_PATH}/conversations")


def _client() -> httpx.Client:
    return httpx.Client(trust_env=False, follow_redirects=False)


def scrapes(deployment: Deployment) -> tuple[float, dict[str, web.Answer]]:
    begun = time.monotonic()
    with _client() as client, ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda leg: web.get(client, leg.url, "/metrics"), deployment.legs)
        return begun, dict(zip([leg.name for leg in deployment.legs], answers, strict=True))


def write_metrics(folder: Path, first: dict[str, web.Answer], last: dict[str, web.Answer]) -> None:
    for leg, answer in first.items():
        scrapes = [each.body for each in (answer, last[leg]) if each.status == 200]
        if scrapes:
            write(folder, f"{leg}/metrics.txt", f"\n{SCRAPE_SEPARATOR}\n".join(scrapes))


def ask(deployment: Deployment, folder: Path) -> None:
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
                write(folder, f"{leg.name}/settings.json", redact.text(answer.body))
            continue
        if answer.status == 404:
            continue
        name = re.sub(r"\W+", "-", path.partition("?")[0]).strip("-")
        write(folder, f"{leg.name}/http/{name}.txt", redact.text(answer.text()))


def reach(deployment: Deployment, folder: Path) -> None:
    """Whether the engines' addresses resolve, and their ports take connections from here."""
    addresses = [(leg, host, port) for leg in deployment.engines for host, port in leg.listens]
    with ThreadPoolExecutor(16) as pool:
        lines = list(pool.map(lambda item: connect(item[1], item[2]), addresses))
    by_leg: dict[str, list[str]] = {}
    for (leg, host, port), line in zip(addresses, lines, strict=True):
        by_leg.setdefault(leg.name, []).append(f"$ connect {host} {port}\n{line}\n")
    for name, texts in by_leg.items():
        write(folder, f"{name}/commands/connect.txt", "".join(texts))


def connect(host: str, port: int) -> str:
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
