"""Handles between turns: claimed once, restored only if unread, scoped by tenant."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pd_connector.contract import Outcome
from pd_router.history import Past


@dataclass(frozen=True, slots=True)
class Handle:
    """What decode returned for a finished turn."""

    params: bytes
    """``kv_transfer_params`` as JSON."""
    leg: str
    """Name of the decode leg that holds the blocks."""
    past: Past
    """The turn whose tokens the blocks hold."""
    token_proof: bool
    """The handle carries a digest of the token ids (``PD_TOKENS``)."""
    born: float
    """When the handle arrived, on the store's clock, in seconds."""


def key_of(authorization: str, conversation: str) -> str:
    """The store's key: two tenants with one conversation id have two keys."""
    tenant = hashlib.sha256(authorization.encode(errors="surrogateescape")).digest()
    text = conversation.encode(errors="surrogatepass")
    return hashlib.sha256(tenant + text).hexdigest()


class HandleStore:
    """At most ``capacity`` handles, each usable for ``ttl`` seconds, one per key.

    An expired handle stays for another ``ttl`` so that its turn can be told that it
    expired; it is never handed out.
    """

    def __init__(
        self, ttl: float, capacity: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl = ttl
        self._capacity = capacity
        self._clock = clock
        self._handles: OrderedDict[str, Handle] = OrderedDict()

    def now(self) -> float:
        return self._clock()

    def age(self, handle: Handle) -> float:
        """Seconds since the handle arrived."""
        return self._clock() - handle.born

    def held(self) -> int:
        """Handles that could be claimed now."""
        expired = 0
        for handle in self._handles.values():  # oldest first
            if self.age(handle) < self._ttl:
                break
            expired += 1
        return len(self._handles) - expired

    def claim(self, key: str) -> Handle | Outcome:
        """Take the key's handle out for good, or say why there is none."""
        handle = self._handles.pop(key, None)
        if handle is None:
            return Outcome.MISS
        if self.age(handle) >= self._ttl:
            return Outcome.EXPIRED
        return handle

    def restore(self, key: str, handle: Handle) -> None:
        """Put back a claimed handle that no prefill leg has seen."""
        self._handles.setdefault(key, handle)

    def put(self, key: str, handle: Handle) -> None:
        """Keep a new handle; the key's older one and the oldest beyond capacity go."""
        self._handles.pop(key, None)
        self._handles[key] = handle
        while len(self._handles) > self._capacity or self._oldest_is_forgotten():
            self._handles.popitem(last=False)

    def drop_leg(self, leg: str) -> int:
        """Forget every handle of a decode leg; says how many."""
        keys = [key for key, handle in self._handles.items() if handle.leg == leg]
        for key in keys:
            del self._handles[key]
        return len(keys)

    def _oldest_is_forgotten(self) -> bool:
        oldest = next(iter(self._handles.values()), None)
        return oldest is not None and self.age(oldest) >= 2 * self._ttl
