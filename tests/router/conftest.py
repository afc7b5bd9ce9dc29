"""Routers between fake engines for the tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_rig import Router, StartRouter, launch, numbers

from fake_engine import FakeEngine


@pytest.fixture(scope="session")
def shared_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    prefill, decode = FakeEngine("prefill").start(), FakeEngine("decode").start()
    router = launch(
        tmp_path_factory.mktemp("router"),
        [prefill],
        [decode],
        readback_timeout=1,
        pair_pause=0.001,
        conversation_headers=["X-My-Chat"],
        max_body_bytes=1_000_000,
    )
    yield router
    router.stop()
    prefill.stop()
    decode.stop()


@pytest.fixture
def router(shared_router: Router) -> Iterator[Router]:
    """The router with pd_connector on both legs, shared by all tests that leave it whole."""
    shared_router.reset()
    yield shared_router
    for engine in shared_router.engines:
        engine.released.set()
        assert engine.violations == []
    assert "Traceback" not in shared_router.log


@pytest.fixture
def start_router(tmp_path: Path) -> Iterator[StartRouter]:
    """Start a router of a test's own: engines per role, and the router's settings."""
    started: list[Router] = []

    def start(*, prefills: int = 1, decodes: int = 1, ttl: float = 480, **settings: Any) -> Router:
        prefill = [FakeEngine("prefill").start() for _ in range(prefills)]
        decode = [FakeEngine("decode", ttl=ttl).start() for _ in range(decodes)]
        router = launch(tmp_path, prefill, decode, **settings)
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
