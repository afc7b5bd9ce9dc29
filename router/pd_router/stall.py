"""What appended prompts take from a decode leg's running streams."""

import time


class Stall:
    """How much of decode's time appended prompts have taken: drains by ``budget`` ms a second."""

    def __init__(self) -> None:
        self._ms = 0.0
        self._at = time.monotonic()

    def room(self, ms: float, budget: float) -> bool:
        self._drain(budget)
        return self._ms + ms <= budget

    def add(self, ms: float, budget: float) -> None:
        self._drain(budget)
        self._ms += ms

    def _drain(self, budget: float) -> None:
        now = time.monotonic()
        self._ms = max(0.0, self._ms - (now - self._at) * budget)
        self._at = now
