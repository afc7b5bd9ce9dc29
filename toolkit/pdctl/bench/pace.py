"""How long the rest of a run takes, by what its like took so far."""

import time
from collections.abc import Sequence

from pdctl.bench.arms import Arm

Todo = Sequence[tuple[Arm, int]]
"""Arms and repeats that are still to be run, in order."""


class Pace:
    """All times are seconds; the deadline counts from the moment this is made."""

    def __init__(self, arms: list[Arm], deadline_s: float | None) -> None:
        self._restarts = len({arm.bidirectional for arm in arms}) > 1
        self._deadline_s = deadline_s
        self._began = time.monotonic()
        self._took: dict[str, list[float]] = {}
        self._starts: list[float] = []

    def started(self, seconds: float) -> None:
        """A start of the engines took this long."""
        self._starts.append(seconds)

    def took(self, arm: Arm, seconds: float) -> None:
        """A repeat of this arm took this long."""
        self._took.setdefault(arm.name, []).append(seconds)

    def too_late(self, todo: Todo) -> bool:
        """Whether what follows would outlast the deadline: the next repeat of the next arm, or of
        every arm where they alternate, since one without the others is of no use."""
        if self._deadline_s is None:
            return False
        arm, repeat = todo[0]
        wanted = self._expected(arm)
        for other, number in todo[1:]:
            if number != repeat:
                break
            wanted += self._expected(other)
        return time.monotonic() - self._began + wanted > self._deadline_s

    def _expected(self, arm: Arm) -> float:
        """By the longest so far; nothing is known before the first."""
        took = self._took.get(arm.name) or [each for times in self._took.values() for each in times]
        return max(took, default=0.0) * 1.1

    def left(self, todo: Todo) -> float:
        """What the rest takes."""
        every = [took for each in self._took.values() for took in each]
        mean = sum(every) / len(every)
        took = sum(
            sum(self._took[arm.name]) / len(self._took[arm.name])
            if arm.name in self._took
            else mean
            for arm, _ in todo
        )
        restarts = len({arm.name for arm, _ in todo if arm.name not in self._took})
        start = sum(self._starts) / len(self._starts) if self._starts else 0.0
        return took + (restarts * start if self._restarts else 0.0)


def minutes(seconds: float) -> str:
    """Such as ``2 min 5 s``."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest} s" if whole else f"{rest} s"
