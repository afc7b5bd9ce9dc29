"""Leases of held handles, renewed on decode while their conversations pause: in the background, up
to an age.

Decode frees a turn that nobody renews after its TTL, so that a router that dies leaves nothing
behind. A handle whose lease was lost all the same is harmless: prefill asks decode before it reads.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

from pd_router.leases import MOST_AT_ONCE, PAUSE_SECONDS, LeaseOrders
from pd_router.legs import Leg
from pd_router.settings import Settings

_RETRY_SECONDS = 5.0


class _Lease(NamedTuple):
    """Times are on the monotonic clock."""

    due: float
    leg: str
    engine: str
    request: str
    began: float
    ends: float
    """When decode frees the turn, as far as the router knows; its margin left out."""


class Renewals:
    """What is to be renewed and what works it off; nothing without ``handle_max_age``."""

    def __init__(
        self,
        orders: LeaseOrders,
        leg_named: Callable[[str], Leg | None],
        settings: Callable[[], Settings],
    ) -> None:
        self._orders = orders
        self._leg_named = leg_named
        self._settings = settings
        self._leases: list[_Lease] = []
        self._wake = asyncio.Event()

    def keep(self, leg: str, engine: str, request: str, seconds: float) -> float:
        """Renew from now on the lease of a turn, by its ``remote_request_id``, that has
        ``seconds`` to go; for how many seconds its handle may be used."""
        settings = self._settings()
        longest = settings.handle_max_age or 0.0
        if longest <= seconds or not self._orders.takes(leg, engine):
            return seconds
        if settings.connector != "pdctl" or len(self._leases) >= settings.max_handles:
            return seconds
        now = time.monotonic()
        self._push(_Lease(now + seconds / 2, leg, engine, request, now, now + seconds))
        self._wake.set()
        return longest

    async def work(self) -> None:
        """Renew what is due, for ever."""
        while True:
            if not self._leases:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(PAUSE_SECONDS)
            for name, leases in groupby(sorted(self._due(), key=_leg_of), key=_leg_of):
                due = list(leases)
                for start in range(0, len(due), MOST_AT_ONCE):
                    await self._renew(self._leg_named(name), due[start : start + MOST_AT_ONCE])

    def _due(self) -> Iterable[_Lease]:
        now = time.monotonic()
        while self._leases and self._leases[0].due <= now:
            yield heapq.heappop(self._leases)

    async def _renew(self, leg: Leg | None, leases: list[_Lease]) -> None:
        if leg is None:
            return
        settings, now = self._settings(), time.monotonic()
        longest, margin = settings.handle_max_age or 0.0, settings.decode_ttl - settings.handle_ttl
        wanted = {}
        for lease in leases:
            left = lease.began + longest - now
            if left > 0 and leg.engine in (lease.engine, None, ""):
                wanted[lease] = min(settings.handle_ttl, left)
        order = {lease.request: seconds + margin for lease, seconds in wanted.items()}
        answer = None
        if order and leg.down is None:
            answer = await self._orders.send(leg, {"renew": order})
        renewed = answer.get("renewed") if answer is not None else None
        for lease, seconds in wanted.items():
            if not isinstance(renewed, dict):
                self._try_again(lease, now)
            elif lease.request in renewed:
                self._renewed(lease, now, seconds, longest)

    def _renewed(self, lease: _Lease, now: float, seconds: float, longest: float) -> None:
        if now + seconds < lease.began + longest:
            self._push(lease._replace(due=now + seconds / 2, ends=now + seconds))

    def _try_again(self, lease: _Lease, now: float) -> None:
        due = now + min(_RETRY_SECONDS, (lease.ends - now) / 2)
        if now < lease.ends and self._orders.takes(lease.leg, lease.engine):
            self._push(lease._replace(due=due))

    def _push(self, lease: _Lease) -> None:
        heapq.heappush(self._leases, lease)


def _leg_of(lease: _Lease) -> str:
    return lease.leg
