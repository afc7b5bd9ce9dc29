"""Telling decode legs which of their kept turns nobody will read: in the background, bounded."""

import asyncio
from collections.abc import Callable

from pd_router.handles import Handle
from pd_router.leases import MOST_AT_ONCE, PAUSE_SECONDS, LeaseOrders
from pd_router.legs import Leg

MOST_QUEUED = 10_000
"""Turns that wait to be released, over all legs; beyond it their own deadline frees them."""


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
            self._queue.setdefault(leg, {})[request] = None
            self._queued += 1
            self._wake.set()

    async def work(self) -> None:
        """Send what is queued, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._send_all()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _send_all(self) -> None:
        queue, self._queue, self._queued = self._queue, {}, 0
        for name, requests in queue.items():
            leg, ids = self._leg_named(name), list(requests)
            for start in range(0, len(ids), MOST_AT_ONCE):
                if leg is not None and leg.down is None:
                    await self._orders.send(leg, {"release": ids[start : start + MOST_AT_ONCE]})
