"""How long decode keeps a handle's blocks, from the handle's own deadline."""

import time
from collections.abc import Mapping
from typing import Any

from pd_connector import contract

_WINDOW_SECONDS = 600.0


class Deadlines:
    """Reads deadlines that are on an engine's own clock.

    The deadline less the time of arrival is greatest for a handle that came at once and has
    its whole life before it. One for which it is less came late, or lives shorter, by the
    difference.
    """

    def __init__(self) -> None:
        self._greatest: dict[str, tuple[float, float, float]] = {}

    def seconds_left(self, engine: str, params: Mapping[str, Any], ttl: float) -> float:
        """Of a handle that has just arrived; ``ttl`` is the settings' and the most there is."""
        deadline = params.get(contract.REMOTE_EXPIRY)
        if not isinstance(deadline, int | float) or isinstance(deadline, bool):
            return ttl
        now = time.monotonic()
        offset = deadline - now
        # Two windows, so that clocks that drift apart do not add up over days.
        since, current, last = self._greatest.get(engine, (now, offset, offset))
        if now - since > _WINDOW_SECONDS:
            since, current, last = now, offset, current
        current = max(current, offset)
        self._greatest[engine] = (since, current, last)
        return ttl - (max(current, last) - offset)
