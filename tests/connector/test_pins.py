"""Decode's finished turns beside requests that need blocks (a pool of blocks stands in for
vLLM's)."""

from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector import telemetry
from pd_connector.contract import PD_LEASE, PD_PREVIOUS
from pd_connector.counters import Pending
from pd_connector.leases import Leases
from pd_connector.pins import Pins


class FakePool:
    def __init__(self, total: int) -> None:
        self.num_gpu_blocks = total
        self.blocks = [SimpleNamespace(ref_cnt=0) for _ in range(total)]

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks)

    def take(self, *blocks: int) -> tuple[int, ...]:
        for block in blocks:
            self.blocks[block].ref_cnt += 1
        return blocks


class Engine:
    def __init__(self) -> None:
        self.leases, self.pending, self.pool = Leases(), Pending(), FakePool(100)
        self.pins = Pins(self.leases, self.pending, 0.8, [128])
        self.pins.bind(self.pool)
        self.pending.take()

    def finish(self, turn: str, *blocks: int, **asked: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        self.pool.take(*blocks)
        deadline = self.leases.clock() + 100
        self.pins.finished(turn, asked, answer, [blocks], len(blocks) * 128, deadline)
        return answer

    def released(self) -> set[str]:
        commands = self.pins.step()
        return set(commands.release) if commands else set()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_handle_says_that_decode_knows_claims(engine: Engine) -> None:
    assert engine.finish("a", 1)[PD_LEASE] == {"v": 1}


def test_a_successor_frees_the_turn_before(engine: Engine) -> None:
    engine.finish("a", 1)
    engine.finish("b", 2, **{PD_PREVIOUS: "a"})
    assert engine.released() == {"a"}
    engine.pins.freed(["a", "not-ours"])
    engine.finish("c", 3, **{PD_PREVIOUS: "c"})
    engine.finish("d", 4, **{PD_PREVIOUS: ["c"]})
    assert engine.released() == set()


def test_of_several_answers_the_last_is_kept(engine: Engine) -> None:
    for answer, block in (("0_cmpl-x", 1), ("2_cmpl-x", 2), ("0_cmpl-y", 3), ("1_cmpl-x", 4)):
        engine.finish(answer, block)
    assert engine.released() == {"0_cmpl-x", "2_cmpl-x"}


def test_the_last_of_several_answers_may_come_late(engine: Engine) -> None:
    engine.finish("0_cmpl-x", 1)
    engine.finish("1_cmpl-x", 2)
    assert engine.released() == {"0_cmpl-x"}
    engine.pins.freed(["0_cmpl-x"])
    engine.finish("2_cmpl-x", 3)
    assert engine.released() == {"1_cmpl-x"}


def test_turns_let_go_above_the_mark(engine: Engine) -> None:
    engine.finish("a", *range(40))
    engine.finish("b", *range(40, 79))
    assert engine.released() == set()
    engine.pool.take(*range(90, 93))
    assert engine.released() == {"a"}


def test_shared_blocks_do_not_count_as_room(engine: Engine) -> None:
    engine.finish("a", *range(40))
    engine.pool.take(*range(40))
    engine.finish("b", *range(40, 85))
    assert engine.released() == {"a", "b"}


def test_a_request_that_finds_no_blocks_gets_some(engine: Engine) -> None:
    engine.finish("a", *range(30))
    engine.finish("b", *range(30, 60))
    waiting = SimpleNamespace(num_tokens=50 * 128)
    engine.pins.wanted(waiting)
    assert engine.released() == {"a"}
    # Placed in the same step: nothing is missing.
    engine.pins.wanted(SimpleNamespace(num_tokens=90 * 128))
    engine.pins.placed(engine.pins._unplaced)
    assert engine.released() == set()


def test_what_is_kept_is_told_also_by_the_last_step(engine: Engine) -> None:
    engine.finish("a", 1, 2)
    engine.pins.step()
    pins, blocks = telemetry.ENGINE_PINS.name, telemetry.ENGINE_PINNED_BLOCKS.name
    assert engine.pending.take() == [(pins, (), 1), (blocks, (), 2)]
    engine.leases.claim("a", "reader")
    engine.pins.freed(["a"])
    ended = (telemetry.ENGINE_PINS_ENDED.name, ("read",), 1)
    assert engine.pending.take() == [ended, (pins, (), 0), (blocks, (), 0)]


def test_a_pool_that_does_not_fit_has_no_mark() -> None:
    pins = Pins(Leases(), Pending(), 0.8, [128])
    pins.bind(SimpleNamespace())
    pins.finished("a", {}, {}, [[1]], 128, 1e12)
    assert pins.step() is None
    assert pins.state()["blocks"] is None
