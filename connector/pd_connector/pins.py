"""Decode's finished turns inside the scheduler: pinned, released, and never in the way of
requests that need their blocks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pd_connector.contract import PD_LEASE, PD_PREVIOUS
from pd_connector.counters import Pending
from pd_connector.leases import Commands, Leases
from pd_connector.telemetry import (
    ENGINE_BLOCKS,
    ENGINE_PINNED_BLOCKS,
    ENGINE_PINS,
    ENGINE_PINS_ENDED,
)

COMMANDS = "pd_lease_commands"
READ_SECONDS = "pd_read_seconds"
"""Attributes of vLLM's connector metadata, on the way from scheduler to workers: Commands, and
how many seconds a request's READ may take."""

HIGH_WATER = 0.8
"""The mark where the configuration sets none."""

# The answers of one request with n > 1: "0_cmpl-...", "1_cmpl-...".
_SIBLING = re.compile(r"^\d+_(.+)$")


class Pins:
    """What the scheduler of a decode engine does about its leases, step by step."""

    def __init__(
        self,
        leases: Leases,
        pending: Pending,
        high_water: float,
        block_sizes: Sequence[int | None],
    ) -> None:
        self._leases = leases
        self._pending = pending
        self._high_water = high_water
        self._block_sizes = [size for size in block_sizes if size]
        self._pool: Any = None
        self._unplaced: Any = None
        self._told: tuple[int, int] = (0, 0)
        self._last_of: dict[str, str] = {}

    def bind(self, pool: Any) -> None:
        """The engine's pool of KV blocks; without one that fits there is no high-water mark."""
        seams = ("get_num_free_blocks", "num_gpu_blocks", "blocks")
        if all(hasattr(pool, name) for name in seams):
            self._pool = pool
            self._pending.add(ENGINE_BLOCKS, amount=pool.num_gpu_blocks)
            self._pending.add(ENGINE_PINS, amount=0)
            self._pending.add(ENGINE_PINNED_BLOCKS, amount=0)

    def wanted(self, request: Any) -> None:
        """The scheduler is about to look for blocks for a request."""
        self._unplaced = request

    def placed(self, request: Any) -> None:
        """The request has its blocks."""
        if self._unplaced is request:
            self._unplaced = None

    def finished(
        self,
        turn: str,
        asked: Mapping[str, Any],
        answer: dict[str, Any],
        blocks: Sequence[Sequence[int]],
        tokens: int,
        deadline: float,
    ) -> None:
        """A turn's blocks are kept; ``asked`` and ``answer`` are its kv_transfer_params."""
        self._leases.pin(turn, {b for group in blocks for b in group}, tokens, deadline)
        answer[PD_LEASE] = {"v": 1}
        before = [asked.get(PD_PREVIOUS), self._sibling_before(turn)]
        self._leases.release([t for t in before if isinstance(t, str) and t != turn], "successor")

    def freed(self, requests: Iterable[str]) -> None:
        """The workers have freed the blocks of these requests."""
        for request in requests:
            if (why := self._leases.ended(request)) is not None:
                self._pending.add(ENGINE_PINS_ENDED, why)
                sibling = _SIBLING.match(request)
                if sibling is not None and self._last_of.get(sibling[1]) == request:
                    del self._last_of[sibling[1]]
        self._tell()

    def step(self) -> Commands | None:
        """What the workers are told with the step that is being built."""
        if self._leases.held()[0]:
            self._make_room()
        self._tell()
        self._unplaced = None
        return self._leases.commands()

    def state(self) -> dict[str, Any]:
        """Counts for the lease endpoint."""
        pins, blocks = self._leases.held()
        total = self._pool.num_gpu_blocks if self._pool is not None else None
        return {
            "pins": pins,
            "pinned_blocks": blocks,
            "blocks": total,
            "high_water": self._high_water,
        }

    def _tell(self) -> None:
        if (held := self._leases.held()) != self._told:
            self._told = held
            self._pending.add(ENGINE_PINS, amount=held[0])
            self._pending.add(ENGINE_PINNED_BLOCKS, amount=held[1])

    def _make_room(self) -> None:
        if self._pool is None:
            return
        total, free = self._pool.num_gpu_blocks, self._pool.get_num_free_blocks()
        short = int(total * (1 - self._high_water)) - free
        if self._unplaced is not None:
            short = max(short, self._blocks_for(self._unplaced) - free)
        if short > 0:
            self._leases.make_room(short, self._would_come_free)

    def _blocks_for(self, request: Any) -> int:
        return sum(-(-request.num_tokens // size) + 1 for size in self._block_sizes)

    def _would_come_free(self, blocks: Sequence[int]) -> int:
        return sum(self._pool.blocks[block].ref_cnt == 1 for block in blocks)

    def _sibling_before(self, turn: str) -> str | None:
        """The answer of the same request that finished before; its handle is not handed out."""
        if (sibling := _SIBLING.match(turn)) is None:
            return None
        before = self._last_of.get(sibling[1])
        self._last_of[sibling[1]] = turn
        return before
