"""Marking legs down and bringing them back."""

import asyncio
import logging
from urllib.parse import urlsplit

from pd_router.engines import Engines, LegFailure, NotReached
from pd_router.handles import HandleStore
from pd_router.legs import Leg, Legs

log = logging.getLogger("pd_router")

PROBE_INTERVAL = 0.5
"""Seconds between two looks at the legs. An engine takes longer to start, so that none
restarts unseen and with it the handles of its former self."""
_PROBE_SECONDS = 5.0


class Health:
    """Which legs are up. While one is down, turns do not wait for it; only the probe asks it."""

    def __init__(self, legs: Legs, engines: Engines, handles: HandleStore) -> None:
        self._legs = legs
        self._engines = engines
        self._handles = handles

    def mark_down(self, leg: Leg, reason: str) -> None:
        """Send no more turns to ``leg``; what a decode leg held is lost with it."""
        was_up = leg.down is None
        leg.down = reason
        if not was_up:
            return
        log.warning("leg %s is down: %s", leg.name, reason)
        if leg.role == "decode":
            self._handles.drop_leg(leg.name)

    async def check(self, leg: Leg) -> str | None:
        """Ask the leg itself; returns why it is not healthy, None if it is."""
        try:
            status, _ = await self._engines.get(leg, "/health", {}, total=_PROBE_SECONDS)
        except NotReached as failure:
            self.mark_down(leg, failure.reason)
            return failure.reason
        except LegFailure as failure:
            return failure.reason
        if status != 200:
            return f"/health answered {status}"
        if leg.down is not None:
            log.info("leg %s is back", leg.name)
            leg.down = None
        return None

    async def check_all(self) -> dict[Leg, str | None]:
        legs = list(self._legs)
        return dict(zip(legs, await asyncio.gather(*map(self.check, legs)), strict=True))

    async def watch(self) -> None:
        """Look after the legs, for ever."""
        while True:
            try:
                await asyncio.gather(*map(self._look, self._legs))
            except Exception:
                log.exception("unexpected error in the health probe")
            await asyncio.sleep(PROBE_INTERVAL)

    async def _look(self, leg: Leg) -> None:
        if leg.down is not None:
            await self.check(leg)
        elif await _refuses(leg):
            self.mark_down(leg, "connection refused")


async def _refuses(leg: Leg) -> bool:
    """Whether nothing listens there. A bare connect leaves no line in the engine's log."""
    parts = urlsplit(leg.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        connect = asyncio.open_connection(parts.hostname, port)
        _, writer = await asyncio.wait_for(connect, _PROBE_SECONDS)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return False
