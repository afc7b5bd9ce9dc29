"""The legs behind the router: which are up, and which one takes the next turn."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from pd_router.errors import TurnError, unavailable
from pd_router.settings import LegSettings
from pd_router.stall import Stall

Role = Literal["prefill", "decode"]

# vLLM numbers the engines of one leg's data-parallel ranks.
_RANK = re.compile(r"_dp\d+$")


@dataclass(slots=True, eq=False)
class Leg:
    """One engine."""

    name: str
    role: Role
    url: str
    bidirectional: bool = True
    prefix_caching: bool = False
    in_flight: int = 0
    """Requests."""
    tokens: int = 0
    """Prompt tokens in flight that it has to compute, as estimated when they were sent."""
    served: int = 0
    down: str | None = None
    """Why no turn goes there; None: it is up."""
    draining: bool = False
    """It ends what it has and gets no new turns."""
    engine: str | None = None
    """Id of its engine, without the rank, as its handles tell; a restart changes it."""
    started: str | None = None
    """What its probe tells of its start; a restart changes it."""
    stall: Stall = field(default_factory=Stall)

    @property
    def usable(self) -> bool:
        return self.down is None and not self.draining

    def serving(self, tokens: int = 0) -> "Serving":
        """Counts one request in flight, and the tokens that it has to compute."""
        self.in_flight += 1
        self.served += 1
        self.tokens += tokens
        return Serving(self, tokens)


@dataclass(slots=True, eq=False)
class Serving:
    """A request in flight; it is over with :meth:`end`, or as a context."""

    leg: Leg
    tokens: int

    def end(self) -> None:
        self.leg.in_flight -= 1
        self.leg.tokens -= self.tokens

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self.end()


class Legs:
    """All legs. A leg is up until a connection to it fails, and again once it answers."""

    def __init__(
        self, prefill: Mapping[str, LegSettings], decode: Mapping[str, LegSettings]
    ) -> None:
        self.prefill: list[Leg] = []
        self.decode: list[Leg] = []
        self.addresses: list[str] = []
        """Host and port of every leg, also of those that were; no client sees one."""
        self._gone: dict[str, Leg] = {}
        self.update(prefill, decode)

    def __iter__(self) -> Iterator[Leg]:
        return iter((*self.prefill, *self.decode))

    def update(
        self, prefill: Mapping[str, LegSettings], decode: Mapping[str, LegSettings]
    ) -> list[Leg]:
        """Take a new list of legs. A leg of the same name and address stays as it is; turns that
        run on one that is gone go on. Returns the legs that are gone."""
        before = list(self)
        self.prefill = [_leg(name, "prefill", leg, before) for name, leg in prefill.items()]
        self.decode = [_leg(name, "decode", leg, before) for name, leg in decode.items()]
        for leg in self:
            if (address := urlsplit(leg.url).netloc) not in self.addresses:
                self.addresses.append(address)
        gone = [leg for leg in before if leg not in list(self)]
        self._gone.update({leg.name: leg for leg in gone})
        return gone

    def named(self, name: str) -> Leg | None:
        return next((leg for leg in self if leg.name == name), None)

    def known(self, name: str) -> Leg | None:
        """:meth:`named`, or else the leg that had this name last."""
        return self.named(name) or self._gone.get(name)

    def pick_prefill(
        self, tried: Collection[Leg] = (), good: Callable[[Leg], bool] = lambda leg: True
    ) -> Leg:
        """The prefill leg with least to compute, one that is ``good`` if there is any.

        Raises a 503 if none is up.
        """
        return _least_loaded("prefill", self.prefill, tried, good)

    def pick_decode(
        self,
        preferred: str | None = None,
        avoid: Leg | None = None,
    ) -> Leg:
        """The leg named ``preferred`` if it is usable, else the least loaded, any but ``avoid``
        if there is another.

        Raises a 503 if none is up.
        """
        for leg in self.decode:
            if leg.name == preferred and leg.usable:
                return leg
        return _least_loaded("decode", self.decode, (), lambda leg: leg is not avoid)


def base_of(engine: str) -> str:
    """A leg's engine id without the data-parallel rank."""
    return _RANK.sub("", engine)


def _leg(name: str, role: Role, settings: LegSettings, before: list[Leg]) -> Leg:
    url = settings.url.rstrip("/")
    leg = next((leg for leg in before if (leg.name, leg.role, leg.url) == (name, role, url)), None)
    leg = leg or Leg(name, role, url)
    leg.bidirectional = settings.bidirectional
    leg.prefix_caching = settings.prefix_caching
    return leg


def _least_loaded(
    role: Role, legs: list[Leg], tried: Collection[Leg], good: Callable[[Leg], bool]
) -> Leg:
    up = [leg for leg in legs if leg.usable and leg not in tried]
    if len(up) == 1:
        return up[0]
    if not up:
        raise _none_up(role, legs)
    best = [leg for leg in up if good(leg)] or up
    return min(best, key=lambda leg: (leg.tokens, leg.in_flight, leg.served))


def _none_up(role: Role, legs: list[Leg]) -> TurnError:
    reasons = ", ".join(f"{leg.name} ({_why_not(leg)})" for leg in legs)
    return unavailable(f"No {role} leg is reachable: {reasons}.")


def _why_not(leg: Leg) -> str:
    return leg.down or ("draining" if leg.draining else "connection broke")
