"""Telling decode legs which of their kept turns nobody will read: in the background, bounded."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from pd_router.handles import Handle
from pd_router.leases import MOST_AT_ONCE, PAUSE_SECONDS, LeaseOrders
from pd_router.legs import Leg

MOST_QUEUED = 10_000
"""Turns that wait to be released, over all legs; beyond it their own deadline frees them."""
_LAST_SECONDS = 3.0
"""For the last releases, when the router ends: a leg may be gone without a word."""


class Releases:
    """The queue of turns to release and what works it off."""

    def __init__(self, orders: LeaseOrders, leg_named: Callable[[str], Leg | None]) -> None:
        self._orders = orders
        self._leg_named = leg_named
        self._queue: dict[str, dict[str, None]] = {}
        self._queued = 0
        self._wake = asyncio.Event()

    def add(self, handle: Handle) -> None:
        """Release a handle's turn soon."""
        if handle.request:
            self._add(handle.leg, handle.engine, handle.request)

    def add_request(self, leg: Leg, request: str) -> None:
        """Release a turn, by its ``remote_request_id``, soon."""
        self._add(leg.name, leg.engine or "", request)

    def _add(self, leg: str, engine: str, request: str) -> None:
        if self._orders.takes(leg, engine) and self._queued < MOST_QUEUED:
            queue = self._queue.setdefault(leg, {})
            self._queued += request not in queue
            queue[request] = None
            self._wake.set()

    async def work(self) -> None:
        """Send what is queued, until it is cancelled; what was not sent then stays queued."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for name in list(self._queue):
                for batch in _batches(self._queue[name]):
                    await self._send(name, batch)
                    self._forget(name, batch)
            await asyncio.sleep(PAUSE_SECONDS)

    def _forget(self, name: str, requests: list[str]) -> None:
        queue = self._queue[name]
        for request in requests:
            del queue[request]
        self._queued -= len(requests)

    async def finish(self, handles: Iterable[Handle]) -> tuple[int, int]:
        """Release what is queued and the turns of ``handles``, all legs at once and for the last
        time. How many decode has freed, and how many it may keep until their deadline.
        """
        for handle in handles:
            if handle.request:
                self._queue.setdefault(handle.leg, {})[handle.request] = None
        wanted = sum(map(len, self._queue.values()))
        freed: list[str] = []

        async def send_all(name: str) -> None:
            for batch in _batches(self._queue[name]):
                freed.extend(batch if await self._send(name, batch) else ())

        with contextlib.suppress(asyncio.TimeoutError):
            work = asyncio.gather(*map(send_all, self._queue))
            await asyncio.wait_for(work, _LAST_SECONDS)
        return len(freed), wanted - len(freed)

    async def _send(self, name: str, requests: list[str]) -> bool:
        """Whether the leg has heard of it."""
        leg = self._leg_named(name)
        if leg is None or leg.down is not None or not self._orders.takes(name, leg.engine or ""):
            return False
        return await self._orders.send(leg, {"release": requests}) is not None


def _batches(requests: Iterable[str]) -> list[list[str]]:
    """As many as travel in one order."""
    ids = list(requests)
    return [ids[start : start + MOST_AT_ONCE] for start in range(0, len(ids), MOST_AT_ONCE)]
