"""Routers between fake engines for the tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from router_rig import Router, StartRouter, launch, numbers

from fake_engine import FakeEngine


@pytest.fixture
def native() -> bool:
    """Whether streams may go through the native part; ``both`` tries it with and without."""
    return True


@pytest.fixture(scope="session")
def shared_routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Router]]:
    started: dict[bool, Router] = {}

    def get(native: bool) -> Router:
        if native not in started:
            started[native] = launch(
                tmp_path_factory.mktemp("router"),
                [FakeEngine("prefill").start()],
                [FakeEngine("decode").start()],
                native=native,
                readback_timeout=1,
                pair_pause=0.001,
                conversation_headers=["X-My-Chat"],
                max_body_bytes=1_000_000,
            )
        return started[native]

    yield get
    for router in started.values():
        router.stop()
        for engine in router.engines:
            engine.stop()


@pytest.fixture
def router(shared_routers: Callable[[bool], Router], native: bool) -> Iterator[Router]:
    """The router with pd_connector on both legs, shared by all tests that leave it whole."""
    shared = shared_routers(native)
    shared.reset()
    yield shared
    for engine in shared.engines:
        engine.released.set()
        assert engine.violations == []
    assert "Traceback" not in shared.log


@pytest.fixture
def start_router(tmp_path: Path, native: bool) -> Iterator[StartRouter]:
    """Start a router of a test's own: engines per role, and the router's settings."""
    started: list[Router] = []

    def start(*, prefills: int = 1, decodes: int = 1, ttl: float = 480, **settings: Any) -> Router:
        prefill = [FakeEngine("prefill").start() for _ in range(prefills)]
        decode = [FakeEngine("decode", ttl=ttl).start() for _ in range(decodes)]
        router = launch(tmp_path, prefill, decode, **{"native": native, **settings})
        started.append(router)
        return router

    yield start
    for router in started:
        router.stop()
        assert "Traceback" not in router.log
        for engine in router.engines:
            engine.stop()
            assert engine.violations == []


@pytest.fixture
def conversation() -> Iterator[str]:
    yield f"conversation-{next(numbers)}"


@pytest.fixture(params=[True, False], ids=["stream", "whole"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
