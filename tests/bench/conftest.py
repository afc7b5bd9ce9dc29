"""A router between fake engines, to send load to."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from router_rig import Router, launch

from fake_engine import FakeEngine


@pytest.fixture(scope="session")
def served_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    prefill, decode = FakeEngine("prefill").start(), FakeEngine("decode").start()
    router = launch(tmp_path_factory.mktemp("served"), [prefill], [decode])
    yield router
    router.stop()
    prefill.stop()
    decode.stop()


@pytest.fixture
def served(served_once: Router) -> Router:
    served_once.reset()
    return served_once
