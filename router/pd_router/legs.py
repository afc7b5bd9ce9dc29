"""The legs behind the router: which are up, and which one takes the next turn."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from pd_router.errors import TurnError, unavailable
from pd_router.settings import LegSettings

Role = Literal["prefill", "decode"]


@dataclass(slots=True, eq=False)
class Leg:
    """One engine."""

    name: str
    role: Role
    url: str
    in_flight: int = 0
    served: int = 0
    down: str | None = None
    """Why no turn goes there; None: it is up."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Counts one request in flight."""
        self.in_flight += 1
        self.served += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Legs:
    """All legs. A leg is up until a connection to it fails, and again once it answers."""

    def __init__(
        self, prefill: Mapping[str, LegSettings], decode: Mapping[str, LegSettings]
    ) -> None:
        self.prefill = [Leg(name, "prefill", leg.url.rstrip("/")) for name, leg in prefill.items()]
        self.decode = [Leg(name, "decode", leg.url.rstrip("/")) for name, leg in decode.items()]

        self.addresses = [urlsplit(leg.url).netloc for leg in self]
        """Host and port of every leg; no client sees one."""

    def __iter__(self) -> Iterator[Leg]:
        return iter((*self.prefill, *self.decode))

    def pick_prefill(self, tried: Collection[Leg] = ()) -> Leg:
        """The prefill leg with least in flight. Raises a 503 if none is up."""
        return _least_loaded("prefill", self.prefill, tried)

    def pick_decode(self, preferred: str | None = None) -> Leg:
        """The leg named ``preferred`` if it is up, else that with least in flight.

        Raises a 503 if none is up.
        """
        for leg in self.decode:
            if leg.name == preferred and leg.down is None:
                return leg
        return _least_loaded("decode", self.decode, ())


def _least_loaded(role: Role, legs: list[Leg], tried: Collection[Leg]) -> Leg:
    up = [leg for leg in legs if leg.down is None and leg not in tried]
    if not up:
        raise _none_up(role, legs)
    return min(up, key=lambda leg: (leg.in_flight, leg.served))


def _none_up(role: Role, legs: list[Leg]) -> TurnError:
    reasons = ", ".join(f"{leg.name} ({leg.down or 'connection broke'})" for leg in legs)
    return unavailable(f"No {role} leg is reachable: {reasons}.")
