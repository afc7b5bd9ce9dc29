"""An engine core that only keeps turns waits for input instead of stepping (a fake core)."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector import idle


def core_class() -> Any:
    class FakeCore:
        def __init__(self) -> None:
            self.input_queue: queue.Queue[int] = queue.Queue()
            self.shutdown_state = 0
            self.batch_queue = None
            self.executed = False
            ours = SimpleNamespace(connector_scheduler=SimpleNamespace(may_sleep=True))
            self.unfinished = False
            self.scheduler = SimpleNamespace(
                has_unfinished_requests=lambda: self.unfinished,
                finished_req_ids=set(),
                get_kv_connector=lambda: ours,
            )

        def _process_engine_step(self) -> bool:
            return self.executed

    return FakeCore


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    slept: list[Any] = []
    monkeypatch.setattr(idle, "_sleep", slept.append)
    return slept


def test_it_sleeps_only_when_nothing_else_is_to_be_done(sleeps: list[Any]) -> None:
    cls = core_class()
    assert idle.let_sleep(cls) is None
    assert idle.let_sleep(cls) is None

    def steps(**changes: Any) -> int:
        core = cls()
        for name, value in changes.items():
            setattr(core, name, value)
        sleeps.clear()
        assert core._process_engine_step() is core.executed
        return len(sleeps)

    assert steps() == 1
    assert steps(executed=True) == 0
    assert steps(unfinished=True) == 0
    assert steps(shutdown_state=1) == 0
    assert steps(batch_queue=[1]) == 0
    stock = SimpleNamespace(
        has_unfinished_requests=lambda: False,
        finished_req_ids=set(),
        get_kv_connector=SimpleNamespace,
    )
    assert steps(scheduler=stock) == 0


def test_ranks_that_wait_for_each_other_step_as_they_are(sleeps: list[Any]) -> None:
    cls = core_class()
    idle.let_sleep(cls)
    rank = type("RankOfSeveral", (cls,), {})
    assert rank()._process_engine_step() is False
    assert sleeps == []


def test_input_ends_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "SECONDS", 60.0)
    cls = core_class()
    idle.let_sleep(cls)
    core = cls()
    asleep = threading.Thread(target=core._process_engine_step)
    asleep.start()
    core.input_queue.put(1)
    asleep.join(30)
    assert not asleep.is_alive()
    # With input there already it does not fall asleep.
    core._process_engine_step()


def test_another_vllm_is_told_apart() -> None:
    assert idle.let_sleep(type("Other", (), {})) == "Other has no _process_engine_step"
