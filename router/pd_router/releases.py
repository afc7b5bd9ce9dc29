"""Telling decode legs which of their kept turns nobody will read: in the background, bounded."""

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Callable
from pathlib import Path

from pd_connector import contract
from pd_router import jsonbytes
from pd_router.engines import Engines, LegFailure
from pd_router.handles import Handle
from pd_router.legs import Leg

log = logging.getLogger("pd_router")

MOST_QUEUED = 10_000
"""Turns that wait to be released, over all legs; beyond it their own deadline frees them."""
MOST_AT_ONCE = 1000
PAUSE_SECONDS = 0.2
"""Between two rounds: a release is no hurry, and many travel in one request."""
_POST_SECONDS = 5.0


class Releases:
    """The queue of turns to release and what works it off."""

    def __init__(self, engines: Engines, leg_named: Callable[[str], Leg | None]) -> None:
        self._engines = engines
        self._leg_named = leg_named
        self._key = lease_key()
        self._queue: dict[str, dict[str, None]] = {}
        self._queued = 0
        self._off: set[tuple[str, str]] = set()
        self._wake = asyncio.Event()

    def add(self, handle: Handle) -> None:
        """Release a handle's turn soon."""
        if handle.request:
            self._add(handle.leg, handle.engine, handle.request)

    def add_request(self, leg: Leg, request: str) -> None:
        """Release a turn, by its ``remote_request_id``, soon."""
        self._add(leg.name, leg.engine or "", request)

    def _add(self, leg: str, engine: str, request: str) -> None:
        if (leg, engine) not in self._off and self._queued < MOST_QUEUED:
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
                    await self._send(leg, ids[start : start + MOST_AT_ONCE])

    async def _send(self, leg: Leg, ids: list[str]) -> None:
        headers = {} if self._key is None else {contract.LEASE_KEY_HEADER: self._key}
        body = jsonbytes.dump({"release": ids})
        try:
            status, _ = await self._engines.fetch(
                leg, contract.ENGINE_LEASES_PATH, body, headers, total=_POST_SECONDS
            )
        except LegFailure:
            return
        if status in (401, 403, 404, 405):
            if status in (401, 403):
                log.warning(
                    "leg %s refuses to release turns (HTTP %d): the router needs the same %s",
                    leg.name,
                    status,
                    contract.SECRET_FILE_VARIABLE,
                )
            # Until it restarts.
            self._off.add((leg.name, leg.engine or ""))


def lease_key() -> str | None:
    """What opens the leases of this deployment's engines; None without a secret."""
    path = os.environ.get(contract.SECRET_FILE_VARIABLE)
    if not path:
        return None
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        log.warning("%s=%s: %s", contract.SECRET_FILE_VARIABLE, path, error.strerror)
        return None
    return hmac.new(secret, contract.LEASE_KEY_INPUT, hashlib.sha256).hexdigest()
