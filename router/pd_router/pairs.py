"""What a leg's own health does not tell: whether a pair of legs can move KV, and whether it
is time to stop repeating."""

import logging
import time
from dataclasses import dataclass

log = logging.getLogger("pd_router")

FAILURES = 3
"""Transfers in a row that fail before a pair counts as broken."""


@dataclass(slots=True)
class _Pair:
    failures: int = 0
    down_until: float = 0.0


class Pairs:
    """Health of prefill-decode pairs, by leg names; a pair is up until its transfers fail."""

    def __init__(self, pause: float) -> None:
        """``pause``: seconds before a broken pair is tried again."""
        self._pause = pause
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def works(self, prefill: str, decode: str) -> bool:
        """Whether transfers work, as far as is known: a broken pair is until one does."""
        pair = self._pairs.get((prefill, decode))
        return pair is None or pair.failures < FAILURES

    def up(self, prefill: str, decode: str) -> bool:
        """Whether a transfer may be tried: a broken pair may again after its pause."""
        pair = self._pairs.get((prefill, decode))
        return pair is None or time.monotonic() >= pair.down_until

    def failed(self, prefill: str, decode: str) -> None:
        """A transfer between the two failed while both answered."""
        pair = self._pairs.setdefault((prefill, decode), _Pair())
        pair.failures += 1
        if pair.failures >= FAILURES:
            if self.up(prefill, decode):
                log.warning("transfers between %s and %s fail: pair is down", prefill, decode)
            pair.down_until = time.monotonic() + self._pause

    def worked(self, prefill: str, decode: str) -> None:
        if self._pairs.pop((prefill, decode), None) is not None:
            log.info("transfers between %s and %s work", prefill, decode)

    def forget_leg(self, leg: str) -> None:
        """A leg is new: what was known of its pairs is not."""
        for pair in [pair for pair in self._pairs if leg in pair]:
            del self._pairs[pair]


class RepeatBudget:
    """Repeats as a share of the turns, so that failing legs get no more load than turns."""

    SHARE = 0.1
    MOST = 10.0

    def __init__(self) -> None:
        self._left = self.MOST

    def turn(self) -> None:
        self._left = min(self.MOST, self._left + self.SHARE)

    def take(self) -> bool:
        """Whether one more repeat is allowed."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
