"""An engine core that only keeps turns waits for something to do instead of stepping (a fake
core)."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector import idle
from pd_connector.leases import Leases


def core_class() -> Any:
    class FakeCore:
        def __init__(self, turns: int = 1) -> None:
            self.input_queue: queue.Queue[int] = queue.Queue()
            self.shutdown_state = 0
            self.batch_queue = None
            self.executed = False
            self.leases = Leases()
            for number in range(turns):
                deadline = self.leases.clock() + 300
                self.leases.pin(f"turn-{number}", [number], 128, deadline)
            self.ours = SimpleNamespace(may_sleep=True, leases=SimpleNamespace(table=self.leases))
            self.unfinished = False
            self.scheduler = SimpleNamespace(
                requests={f"turn-{number}": None for number in range(turns)},
                has_unfinished_requests=lambda: self.unfinished,
                has_requests=lambda: True,
                finished_req_ids=set(),
                get_kv_connector=lambda: SimpleNamespace(connector_scheduler=self.ours),
            )

        def _process_engine_step(self) -> bool:
            return self.executed

    return FakeCore


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(idle, "_sleep", lambda queue, leases, seconds: slept.append(seconds))
    return slept


def test_it_sleeps_only_when_nothing_else_is_to_be_done(sleeps: list[float]) -> None:
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
    assert steps(ours=None) == 0
    assert steps(ours=SimpleNamespace(may_sleep=False)) == 0


def test_how_long_depends_on_what_is_kept(sleeps: list[float]) -> None:
    cls = core_class()
    idle.let_sleep(cls)
    core = cls()

    def slept() -> float:
        core._process_engine_step()
        return sleeps[-1]

    assert slept() == idle.LONGEST
    core.leases.pin("soon", [9], 128, core.leases.clock() + 3)
    core.scheduler.requests["soon"] = None
    assert 2 < slept() < 3.1
    core.leases.claim("turn-0", "reader")
    assert slept() == idle.BRIEFLY
    # Blocks that are kept for another reason: decode is about to read them from prefill.
    core = cls()
    core.scheduler.requests["prefilled"] = None
    assert slept() == idle.BRIEFLY


def test_ranks_that_wait_for_each_other_step_as_they_are(sleeps: list[float]) -> None:
    cls = core_class()
    idle.let_sleep(cls)
    rank = type("RankOfSeveral", (cls,), {})
    assert rank()._process_engine_step() is False
    assert sleeps == []


@pytest.mark.parametrize("what", ["input", "claim", "release"])
def test_what_comes_ends_the_sleep(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(idle, "LONGEST", 600.0)
    monkeypatch.setattr(idle, "BRIEFLY", 0.001)
    cls = core_class()
    idle.let_sleep(cls)
    core = cls()
    asleep = threading.Thread(target=core._process_engine_step)
    asleep.start()
    if what == "input":
        core.input_queue.put(1)
    elif what == "claim":
        assert core.leases.claim("turn-0", "reader").granted
    else:
        core.leases.release(["turn-0"], "released")
    asleep.join(30)
    assert not asleep.is_alive()
    # What came before keeps it from falling asleep.
    core._process_engine_step()


def test_another_vllm_is_told_apart() -> None:
    assert idle.let_sleep(type("Other", (), {})) == "Other has no _process_engine_step"
