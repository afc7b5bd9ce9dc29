"""Marking legs down and bringing them back, and noticing that a leg is not who it was."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from pd_connector import contract
from pd_router import jsonbytes
from pd_router.engines import Engines, LegFailure, NotReached
from pd_router.handles import HandleStore
from pd_router.legs import Leg, Legs, base_of
from pd_router.pairs import Pairs

log = logging.getLogger("pd_router")

PROBE_INTERVAL = 0.5
"""Seconds between two bare connects to a leg: a dead one is noticed without a turn."""
ASK_INTERVAL = 5.0
"""Seconds between two questions for a leg's health and start."""
UNHEALTHY_ANSWERS = 2
"""Bad answers in a row that take a leg down; a busy engine may be slow once."""
_PROBE_SECONDS = 5.0

_START = re.compile(rb"^process_start_time_seconds (\S+)", re.M)

Background = Callable[[Awaitable[object]], None]


class Health:
    """Which legs are up. While one is down, turns do not wait for it; only the probe asks it."""

    def __init__(
        self,
        legs: Legs,
        engines: Engines,
        handles: HandleStore,
        pairs: Pairs,
        *,
        background: Background,
        on_restart: Callable[[Leg], None],
    ) -> None:
        self._legs = legs
        self._engines = engines
        self._handles = handles
        self._pairs = pairs
        self._background = background
        self._on_restart = on_restart
        self._bad_answers: dict[Leg, int] = {}
        self._asked: dict[Leg, float] = {}

    def mark_down(self, leg: Leg, reason: str) -> None:
        """Send no more turns to ``leg``; what a decode leg held is lost with it."""
        was_up = leg.down is None
        leg.down = reason
        if not was_up:
            return
        log.warning("leg %s is down: %s", leg.name, reason)
        if leg.role == "decode":
            self._background(self._handles.drop_leg(leg.name, "leg_down"))

    def saw_engine(self, leg: Leg, engine: object) -> None:
        """An answer of ``leg`` names its engine; another one than before is a restart."""
        if not isinstance(engine, str):
            return
        engine = base_of(engine)
        if leg.engine is not None and leg.engine != engine:
            self._restarted(leg, engine)
        leg.engine = engine

    def _restarted(self, leg: Leg, engine: str | None) -> None:
        log.warning("leg %s has restarted", leg.name)
        self._on_restart(leg)
        self._pairs.forget_leg(leg.name)
        # What its probe tells next belongs to the engine that is there now.
        leg.engine, leg.started = engine, None
        if leg.role == "decode":
            drop = self._handles.drop_leg(leg.name, "leg_restarted", keep_engine=engine)
            self._background(drop)

    async def check(self, leg: Leg) -> str | None:
        """Ask the leg itself; returns why it is not healthy, None if it is."""
        if leg.down is not None:
            # A leg that is back must not get turns as its former self.
            await self._look_at_start(leg)
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
        if leg.down is None and await _refuses(leg):
            self.mark_down(leg, "connection refused")
        elif leg.down is not None or time.monotonic() - self._asked.get(leg, 0) >= ASK_INTERVAL:
            self._asked[leg] = time.monotonic()
            await self._ask(leg)

    async def _ask(self, leg: Leg) -> None:
        if leg.down is None:
            await self._look_at_start(leg)
        problem = await self.check(leg)
        bad = self._bad_answers.get(leg, 0) + 1 if problem else 0
        self._bad_answers[leg] = bad
        if problem and bad >= UNHEALTHY_ANSWERS:
            self.mark_down(leg, problem)

    async def _look_at_start(self, leg: Leg) -> None:
        try:
            started = await self._start_of(leg)
        except (LegFailure, ValueError):
            return
        if started is None:
            return
        if leg.started not in (None, started) and leg.engine != started:
            self._restarted(leg, None)
        leg.started = started

    async def _start_of(self, leg: Leg) -> str | None:
        """What is new at every start: the engine's id, else its process's start time."""
        path = contract.ENGINE_SETTINGS_PATH
        status, raw = await self._engines.get(leg, path, {}, total=_PROBE_SECONDS)
        if status == 200:
            told = jsonbytes.load(raw)
            engine = told.get("engine_id") if isinstance(told, dict) else None
            if isinstance(engine, str):
                return base_of(engine)
        status, raw = await self._engines.get(leg, "/metrics", {}, total=_PROBE_SECONDS)
        found = _START.search(raw) if status == 200 else None
        return found[1].decode() if found else None


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
