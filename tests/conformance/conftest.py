"""Which router is tested: ours by default, another by its command or its URL.

pytest tests/conformance --router-command 'COMMAND {port} {prefill_0} {decode_0} ...'
pytest tests/conformance --router-url URL --prefill-ports 9100,9101 --decode-ports 9200,9201
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.rig import SECONDS, Rig
from tests.fake_engine import FakeEngine
from tests.ports import free_ports

LEGS = 2
RANKS = 2
OURS = ("pdctl", "stock")
"""The engines that our own router is run with: with pd_connector in them, and without."""
PYTHON = "python"
"""As ``pdctl``, without the router's native part, which is about streams alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--router-command", help="starts the router; {port}, {prefill_0} ... are URLs")
    group.addoption("--router-url", help="a router that runs already")
    group.addoption("--prefill-ports", help="ports that it expects its prefill engines on")
    group.addoption("--decode-ports", help="ports that it expects its decode engines on")
    group.addoption("--engine-host", default="127.0.0.1", help="where the engines listen")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engines" in metafunc.fixturenames:
        own = not _option(metafunc.config, "url") and not _option(metafunc.config, "command")
        ours = (*OURS, PYTHON) if metafunc.module.__name__.endswith("test_streams") else OURS
        metafunc.parametrize("engines", ours if own else ["stock"], scope="session")


def _option(config: pytest.Config, name: str) -> str | None:
    value = config.getoption(f"--router-{name}", default=None)
    return None if value is None else str(value)


@pytest.fixture(scope="session")
def shared_rig(
    engines: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    config = request.config
    host = config.getoption("--engine-host", default="127.0.0.1")
    with running_rig(config, tmp_path_factory.mktemp("conformance"), engines, host) as rig:
        yield rig


@pytest.fixture
def rig(shared_rig: Rig) -> Iterator[Rig]:
    """The router and its engines; whatever a test does, no handle may be misused."""
    shared_rig.reset()
    yield shared_rig
    assert shared_rig.violations == []


@contextlib.contextmanager
def running_rig(config: pytest.Config, folder: Path, engines: str, host: str) -> Iterator[Rig]:
    """Strict fake engines and the router between them."""
    url, command = _option(config, "url"), _option(config, "command")
    ports = {role: _ports(config, role) for role in ("prefill", "decode")}
    legs = {
        role: [_engine(role, engines == "stock", host, port) for port in ports[role]]
        for role in ports
    }
    router = None
    try:
        if not url:
            url, router = _start(command, legs, engines, host, folder)
        _wait(url, router, folder)
        yield Rig(url, legs["prefill"], legs["decode"])
    finally:
        if router is not None:
            router.send_signal(signal.SIGTERM)
            router.wait(SECONDS)
        for engine in [*legs["prefill"], *legs["decode"]]:
            engine.stop()


def _ports(config: pytest.Config, role: str) -> list[int]:
    given = config.getoption(f"--{role}-ports", default=None)
    return [int(port) for port in given.split(",")] if given else [0] * LEGS


def _engine(role: str, stock: bool, host: str, port: int) -> FakeEngine:
    engine = FakeEngine(role, stock=stock)
    engine.host, engine.ranks = host, RANKS
    return engine.start(port)


def _start(
    command: str | None, legs: dict[str, list[FakeEngine]], engines: str, host: str, folder: Path
) -> tuple[str, "subprocess.Popen[bytes]"]:
    port, other = free_ports(2)
    if command is None:
        settings = {
            "name": "router-0",
            "host": host,
            "port": port,
            "connector": "pdctl" if engines == PYTHON else engines,
            "native": engines != PYTHON,
            "route": "readback",
            "pair_pause": 0.001,
            **{
                role: {f"{role}-{n}": {"url": e.url} for n, e in enumerate(legs[role])}
                for role in legs
            },
        }
        (folder / "router.json").write_text(json.dumps(settings))
        words = [sys.executable, "-m", "pd_router", "--config", str(folder / "router.json")]
    else:
        urls = {f"{role}_{n}": e.url for role in legs for n, e in enumerate(legs[role])}
        words = shlex.split(command.format(port=port, other_port=other, host=host, **urls))
    with (folder / "router.log").open("wb") as log:
        router = subprocess.Popen(words, stdout=log, stderr=log, env=dict(os.environ))
    listens = "127.0.0.1" if command and "{host}" not in command else host
    address = f"[{listens}]" if ":" in listens else listens
    return f"http://{address}:{port}", router


def _wait(url: str, router: "subprocess.Popen[bytes] | None", folder: Path) -> None:
    """Until the router answers a turn."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "Are you there?"}]}
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if router is not None and router.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(
                f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=SECONDS
            )
            if answer.status_code == 200:
                return
        time.sleep(0.1)
    log = folder / "router.log"
    said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    pytest.exit(f"the router at {url} answers no turn\n{said}", returncode=2)


@pytest.fixture(scope="session")
def reads_back(shared_rig: Rig) -> bool:
    """Whether the router has prefill read a conversation's blocks back from decode at all."""
    shared_rig.reset()
    chat = shared_rig.chat(stream=False)
    chat.say()
    chat.say()
    return shared_rig.readbacks > 0


@pytest.fixture
def needs_readback(reads_back: bool) -> None:
    """For tests of what must not happen to a handle: without readback they would show nothing."""
    if not reads_back:
        pytest.skip("this router never reads back")
