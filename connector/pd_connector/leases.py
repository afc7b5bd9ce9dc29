"""Leases: which finished turns decode keeps blocks for, until when, and who reads them now.

Decode cannot see a NIXL READ of its blocks before it is over. So prefill claims a turn first
(:mod:`pd_connector.claims`); a claimed turn is never freed before its read has ended or its
claim has lapsed, and a turn can be claimed once at a time.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pd_connector.contract import CLAIM_SECONDS, READ_MARGIN_SECONDS

End = Literal["read", "released", "successor", "high_water", "expired"]
"""Why decode freed a finished turn's blocks."""

_REMEMBERED_ENDS = 4096


class Claim(NamedTuple):
    """Decode's answer to a prefill leg that wants to read a turn."""

    granted: bool
    seconds: float
    """How long the blocks stay for the reader, counted from decode's answer."""
    reason: str
    """``granted``, ``expiring``, ``claimed``, ``unknown`` or how the turn ended (:data:`End`)."""


class Commands(NamedTuple):
    """What the workers are told with the next step."""

    release: frozenset[str]
    extend: dict[str, float]
    """Seconds that each of these turns lives from now on."""


@dataclass
class Pin:
    """A finished turn whose blocks are kept. Times are seconds of the table's clock."""

    blocks: tuple[int, ...]
    tokens: int
    deadline: float
    pinned: float
    touched: float
    """When it was pinned or last claimed. A renewal is no use of it: a router renews all turns of
    conversations that pause, and then the oldest would be the last to make room."""
    reader: str | None = None
    claim_ends: float = 0.0
    wanted: End | None = None
    """To be freed for this reason, once nobody reads it."""
    leaving: End | None = None
    """The workers have been told to free it."""


@dataclass
class Leases:
    """The finished turns of one decode engine. Its methods may be called from any thread."""

    clock: Callable[[], float] = time.perf_counter
    claim_seconds: float = CLAIM_SECONDS
    margin: float = READ_MARGIN_SECONDS
    changed: Callable[[], None] = lambda: None
    """Called, from any thread, when a claim or an order may need a step of the engine soon."""
    _pins: dict[str, Pin] = field(default_factory=dict)
    _claimed: set[str] = field(default_factory=set)
    _ends: "OrderedDict[str, str]" = field(default_factory=OrderedDict)
    _blocks: "Counter[int]" = field(default_factory=Counter)
    _release: set[str] = field(default_factory=set)
    _extend: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pin(self, turn: str, blocks: Iterable[int], tokens: int, deadline: float) -> None:
        """Decode keeps ``blocks`` of a finished turn until ``deadline``."""
        now = self.clock()
        with self._lock:
            pin = Pin(tuple(blocks), tokens, deadline, now, now)
            self._pins[turn] = pin
            self._blocks.update(pin.blocks)

    def claim(self, turn: str, reader: str) -> Claim:
        """Whether ``reader`` may read the turn's blocks now; a reader may renew its own claim."""
        now = self.clock()
        with self._lock:
            self._lapse(now)
            pin = self._pins.get(turn)
            if pin is None:
                return Claim(False, 0.0, self._ends.get(turn, "unknown"))
            if pin.leaving:
                return Claim(False, 0.0, pin.leaving)
            if pin.reader not in (None, reader):
                return Claim(False, 0.0, "claimed")
            if now + self.margin >= pin.deadline:
                return Claim(False, 0.0, "expiring")
            pin.reader, pin.claim_ends = reader, now + self.claim_seconds
            pin.touched = now
            self._claimed.add(turn)
            self._live_until(turn, pin, pin.claim_ends + self.margin)
        self.changed()
        return Claim(True, self.claim_seconds, "granted")

    def unclaim(self, turn: str, reader: str) -> bool:
        """``reader`` did not start its read and will not."""
        with self._lock:
            pin = self._pins.get(turn)
            if pin is None or pin.reader != reader:
                return False
            self._end_claim(turn, pin)
            return True

    def release(self, turns: Iterable[str], why: End) -> dict[str, str]:
        """Free turns: each is ``released``, ``reading`` (freed once read) or ``unknown``."""
        with self._lock:
            self._lapse(self.clock())
            states = {turn: self._want(turn, why) for turn in turns}
        self.changed()
        return states

    def renew(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Let turns live at least so many seconds from now; the seconds that each then has left.

        A lease is never shortened; turns that are unknown or being freed are left out.
        """
        now = self.clock()
        left = {}
        with self._lock:
            for turn, more in seconds.items():
                pin = self._pins.get(turn)
                if pin is None or pin.leaving or pin.wanted:
                    continue
                self._live_until(turn, pin, now + more)
                left[turn] = pin.deadline - now
        return left

    def make_room(self, blocks: int, frees: Callable[[Sequence[int]], int]) -> int:
        """Let the longest idle turns go until about ``blocks`` blocks come free.

        ``frees`` counts the blocks of a turn that nothing else uses. Turns that are on their way
        out count too. Returns the number of blocks that will come free.
        """
        with self._lock:
            self._lapse(self.clock())
            coming = sum(frees(p.blocks) for p in self._pins.values() if p.leaving)
            if coming >= blocks:
                return coming
            idle = [(p.touched, t) for t, p in self._pins.items() if not (p.leaving or p.reader)]
            for _, turn in sorted(idle):
                coming += frees(self._pins[turn].blocks)
                self._want(turn, "high_water")
                if coming >= blocks:
                    break
            return coming

    def commands(self) -> Commands | None:
        """What the workers have not been told yet, or None."""
        if not (self._release or self._extend or self._claimed):
            return None
        now = self.clock()
        with self._lock:
            self._lapse(now)
            release, self._release = frozenset(self._release), set()
            extend = {t: self._pins[t].deadline - now for t in self._extend if t in self._pins}
            self._extend = set()
        return Commands(release, extend) if release or extend else None

    def ended(self, turn: str) -> End | None:
        """The workers have freed a turn's blocks; why, None for one that was never pinned."""
        with self._lock:
            pin = self._pins.pop(turn, None)
            if pin is None:
                return None
            self._claimed.discard(turn)
            self._blocks.subtract(pin.blocks)
            for block in pin.blocks:
                if not self._blocks[block]:
                    del self._blocks[block]
            # A reader that did not claim it did not read: it has no use for the turn.
            unread: End = "expired" if self.clock() >= pin.deadline else "released"
            why: End = pin.leaving or (unread if pin.reader is None else "read")
            self._ends[turn] = why
            if len(self._ends) > _REMEMBERED_ENDS:
                self._ends.popitem(last=False)
            return why

    def held(self) -> tuple[int, int]:
        """Finished turns that are kept, and the distinct blocks they keep."""
        return len(self._pins), len(self._blocks)

    def quiet_for(self) -> float:
        """Seconds in which nothing happens to the kept turns unless :attr:`changed` is called: 0
        while one is read or the workers must be told something."""
        with self._lock:
            if self._claimed or self._release or self._extend:
                return 0.0
            if any(pin.leaving for pin in self._pins.values()):
                return 0.0
            first = min((pin.deadline for pin in self._pins.values()), default=0.0)
        return max(0.0, first - self.clock())

    def turns(self) -> list[dict[str, Any]]:
        """Every kept turn, the longest idle first; times in seconds."""
        now = self.clock()
        with self._lock:
            self._lapse(now)
            rows = sorted(self._pins.items(), key=lambda item: item[1].touched)
            return [
                {
                    "id": turn,
                    "age": round(now - pin.pinned, 3),
                    "idle": round(now - pin.touched, 3),
                    "seconds_left": round(pin.deadline - now, 3),
                    "blocks": len(pin.blocks),
                    "tokens": pin.tokens,
                    "reading": pin.reader is not None,
                }
                for turn, pin in rows
                if not pin.leaving
            ]

    def _want(self, turn: str, why: End) -> str:
        pin = self._pins.get(turn)
        if pin is None:
            return "unknown"
        if pin.leaving:
            return "released"
        if pin.reader is not None:
            pin.wanted = pin.wanted or why
            return "reading"
        pin.leaving = why
        self._extend.discard(turn)
        self._release.add(turn)
        return "released"

    def _live_until(self, turn: str, pin: Pin, deadline: float) -> None:
        if deadline > pin.deadline:
            pin.deadline = deadline
            self._extend.add(turn)

    def _lapse(self, now: float) -> None:
        """End the claims whose readers have not been heard of in time."""
        for turn in [t for t in self._claimed if self._pins[t].claim_ends <= now]:
            self._end_claim(turn, self._pins[turn])

    def _end_claim(self, turn: str, pin: Pin) -> None:
        pin.reader = None
        self._claimed.discard(turn)
        if pin.wanted:
            self._want(turn, pin.wanted)
