"""The choice of a turn's route: what each would cost, and what an append would cost others.

Times are milliseconds to the first token. They come from the turns themselves, or from the
rates of the spec where it gives them.
"""

from operator import itemgetter
from typing import Literal

import msgspec

from pd_connector.contract import Outcome, Route
from pd_router.facts import Facts
from pd_router.legs import Leg
from pd_router.reasons import NoHandle, NotAppended, Refusal, RouteReason
from pd_router.settings import Rates, Settings

_FORGET = 0.85
"""Weight of everything learned so far when a turn is added."""

_WORTH = 0.8
"""Computing again what a readback would bring takes prefill from others, so it has to be
faster by more than the estimates are wrong."""

# Before anything is learned: 32B parameters in bf16, one H200 per leg.
_PREFILL = (20.0, 0.14)
_APPEND = (40.0, 0.2)
_READBACK = (15.0, 0.002)
_HANDOVER = (25.0, 0.003)
_TOKENS_PER_BYTE = 0.25


class Line:
    """Milliseconds = base + rate * tokens, fitted to what was seen, the newest most."""

    def __init__(self, base: float, rate: float, fixed: float | None) -> None:
        """``fixed`` is the spec's rate; the base is still learned."""
        self.base = base
        self.rate = rate if fixed is None else fixed
        self._fixed = fixed is not None
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def ms(self, tokens: float) -> float:
        return self.base + self.rate * max(tokens, 0.0)

    def add(self, tokens: float, ms: float) -> None:
        """Take in what a turn took."""
        sums = (1.0, tokens, ms, tokens * tokens, tokens * ms)
        old = (self._n, self._x, self._y, self._xx, self._xy)
        self._n, self._x, self._y, self._xx, self._xy = [
            _FORGET * was + now for was, now in zip(old, sums, strict=True)
        ]
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if not self._fixed:
            if spread > (0.1 * mean_x) ** 2:
                self.rate = max((self._xy / self._n - mean_x * mean_y) / spread, 0.0)
            else:
                # All of one size: what the base does not explain is the tokens'.
                self.base = min(self.base, 0.5 * mean_y)
                self.rate = max(mean_y - self.base, 0.0) / max(mean_x, 1.0)
        self.base = min(max(mean_y - self.rate * mean_x, 0.0), max(mean_y, 0.0))


class Costs:
    """What is known of the legs' speed."""

    def __init__(self, rates: Rates) -> None:
        self.prefill = Line(*_PREFILL, rates.prefill)
        self.append = Line(*_APPEND, rates.append)
        self.readback = Line(*_READBACK, rates.readback)
        self.handover = Line(*_HANDOVER, rates.handover)
        self._tokens_per_byte = _TOKENS_PER_BYTE

    def tokens_in(self, size: int) -> int:
        """Estimated tokens of so much prompt."""
        return int(size * self._tokens_per_byte) + 1

    def saw_prefill(self, facts: Facts, size: int, ms: float) -> None:
        """A prefill with nothing beside it took ``ms`` for a prompt of ``size``."""
        prompt, computed = facts.prompt_tokens, facts.computed
        if not prompt or computed is None:
            return
        if size > 0:
            self._tokens_per_byte += 0.2 * (prompt / size - self._tokens_per_byte)
        if facts.outcome is not Outcome.HIT:
            self.prefill.add(computed, ms)
        elif facts.read_ms is not None:
            self.readback.add(facts.read, facts.read_ms)
            self.prefill.add(computed, max(ms - facts.read_ms, 0.0))
        else:
            self.readback.add(facts.read, max(ms - self.prefill.ms(computed), 0.0))

    def saw_first_token(self, facts: Facts, ms: float) -> None:
        """Decode's first event took ``ms``, with nothing beside it where it was computed."""
        if facts.route is Route.APPEND and facts.computed is not None:
            self.append.add(facts.computed, ms)
        elif facts.prompt_tokens:
            self.handover.add(facts.prompt_tokens, ms)


class Question(msgspec.Struct, frozen=True):
    """What the choice depends on beside what is learned."""

    prompt_tokens: int
    """Estimated."""
    shared: int
    """Of them, held by the handle."""
    readable: bool
    """The handle may be sent."""
    unreadable_because: Refusal | NoHandle | Literal[""]
    cached: int
    """Of them, in the prefix cache of the decode leg."""
    prefill: Leg | None
    """None: no prefill leg is up."""
    decode: Leg


class Choice(msgspec.Struct, frozen=True, gc=False):
    route: Route
    reason: RouteReason
    new_tokens: int
    """Estimated tokens that have to be computed."""


class Chooser:
    """Picks routes by :class:`Costs` and the settings' bounds."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.costs = Costs(settings.rates)

    def choose(self, asked: Question, pinned: Route | None) -> Choice | None:
        """The cheapest allowed route, or the pinned one where it is possible; None: it takes a
        prefill leg, and none is up."""
        everything = asked.prompt_tokens
        to_read = max(everything - asked.shared, 1)
        to_append = max(everything - asked.cached, 1)
        why_not = self._why_not_append(asked, to_append)
        if pinned is Route.APPEND:
            return Choice(Route.APPEND, "pinned", to_append)
        if asked.prefill is None:
            allowed = pinned is None and why_not is None
            return Choice(Route.APPEND, "no_prefill_leg", to_append) if allowed else None
        if pinned is Route.READBACK and asked.readable:
            return Choice(Route.READBACK, "pinned", to_read)
        if pinned is not None:
            why = "" if pinned is Route.RECOMPUTE else asked.unreadable_because
            return Choice(Route.RECOMPUTE, why or "pinned", everything)
        recompute = Choice(Route.RECOMPUTE, asked.unreadable_because or "cheapest", everything)
        if why_not is not None and not asked.readable:
            return recompute
        costs = [(self._recompute(asked, asked.prefill), recompute)]
        if asked.readable:
            read = Choice(Route.READBACK, why_not or "cheapest", to_read)
            costs.append((_WORTH * self._readback(asked, asked.prefill, to_read), read))
        if why_not is None:
            append = Choice(Route.APPEND, "cheapest", to_append)
            costs.append((_WORTH * self._append(asked.decode, to_append), append))
        return min(costs, key=itemgetter(0))[1]

    def appends(self, decode: Leg, tokens: int) -> None:
        """A prompt of so many new tokens goes to a decode leg."""
        decode.stall.add(self.costs.append.ms(tokens), self.settings.max_decode_stall_ms)

    def _why_not_append(self, asked: Question, new: int) -> NotAppended | None:
        settings, leg = self.settings, asked.decode
        if not leg.prefix_caching:
            return "append_no_prefix_cache"
        if not asked.cached:
            return "append_no_history"
        if new > settings.append_max_tokens:
            return "append_too_long"
        if leg.in_flight and not leg.stall.room(
            self.costs.append.ms(new), settings.max_decode_stall_ms
        ):
            return "append_would_stall"
        return None

    def _recompute(self, asked: Question, leg: Leg) -> float:
        costs = self.costs
        return costs.prefill.ms(asked.prompt_tokens + leg.tokens) + costs.handover.ms(
            asked.prompt_tokens
        )

    def _readback(self, asked: Question, leg: Leg, new: int) -> float:
        costs = self.costs
        return (
            costs.readback.ms(asked.shared)
            + costs.prefill.ms(new + leg.tokens)
            + costs.handover.ms(asked.prompt_tokens)
        )

    def _append(self, leg: Leg, new: int) -> float:
        return self.costs.append.ms(new + leg.tokens)
