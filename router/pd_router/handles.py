"""Handles between turns: found, claimed once, restored only if unread, scoped by tenant."""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from pd_connector import contract
from pd_router.history import Past
from pd_router.packing import unpack as unpack_params

HANDLE_OVERHEAD = 600
"""Bytes that a held handle is counted with beside what it is packed in."""

OnDrop = Callable[["Handle", str], None]
"""Told of a handle that is forgotten unused, and why."""


class Handle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What decode returned for a finished turn. Serialisable: ``pack`` and ``unpack``."""

    id: str
    """Names it among all handles of all routers."""
    request: str
    """``remote_request_id``: what decode knows it by; empty where decode keeps no blocks."""
    key: str
    """What it is found by."""
    packed: bytes
    """``kv_transfer_params`` as compressed JSON; empty: decode keeps no blocks, but its prefix
    cache has the history."""
    leg: str
    """Name of the decode leg that holds the blocks."""
    engine: str
    """Id of that leg's engine, the data-parallel rank left out; a restart changes it."""
    past: Past
    """The turn whose tokens the blocks hold."""
    tokens: int
    """Tokens that the blocks hold."""
    ids_digest: bytes
    """Digest of the ids of those tokens, where the router knows them."""
    proven: bool
    """The handle carries the engine's proof of its tokens."""
    partial: bool
    """... and that proof serves for a part of them."""
    turn: int
    """The turn's number in its conversation, from 1."""
    born: float
    """When the handle arrived, Unix time in seconds."""
    expires: float
    """Until when it may be used."""

    @property
    def readable(self) -> bool:
        return bool(self.packed)

    @property
    def params(self) -> bytes:
        """``kv_transfer_params`` as JSON, every field as decode gave it."""
        return unpack_params(self.packed)

    def age(self) -> float:
        """Seconds since it arrived."""
        return time.time() - self.born

    def live(self) -> bool:
        return time.time() < self.expires

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)


def unpack(raw: bytes) -> Handle:
    """The handle of :meth:`Handle.pack`. Raises :class:`msgspec.DecodeError`."""
    return msgspec.msgpack.decode(raw, type=Handle)


def can_be_read(params: Mapping[str, Any]) -> bool:
    """Decode holds blocks and lets prefill read them."""
    return (
        params.get(contract.DO_REMOTE_DECODE) is True
        and bool(params.get(contract.REMOTE_BLOCK_IDS))
        and isinstance(params.get(contract.REMOTE_REQUEST_ID), str)
    )


class HandleStore(Protocol):
    """Where handles are held; one of several routers may share.

    A claimed handle is out of the store: whatever becomes of its turn, nobody else gets it.
    """

    async def find(self, keys: Sequence[str]) -> list[Handle]:
        """Handles under the first of the keys that has any, the newest first. Expired ones
        among them show where a conversation was."""

    async def claim(self, handle: Handle) -> bool:
        """Take the handle out; False if another turn has it, or it has expired."""

    async def restore(self, handle: Handle) -> None:
        """Put back a claimed handle that no engine has seen."""

    async def commit(self, handle: Handle) -> None:
        """The claimed handle has been used."""

    def put(self, handle: Handle) -> Awaitable[None] | None:
        """Hold a new handle; what is returned is to be awaited before its turn ends."""

    async def drop_leg(self, leg: str, reason: str, keep_engine: str | None = None) -> int:
        """Forget the handles of a decode leg, all but those of one engine; says how many."""

    async def drop(self, handles: Iterable[Handle], reason: str) -> None:
        """Forget handles."""

    async def newest(self, start: int, count: int) -> list[Handle]:
        """Held handles, the newest first, ``start`` of them left out."""
        ...

    def last_here(self) -> Iterable[Handle]:
        """Handles that nobody finds any more once this process has ended."""

    def held(self) -> Mapping[str, int]:
        """Usable handles by leg, as far as this process knows."""

    def bytes_held(self) -> int: ...

    async def watch(self) -> None:
        """What the store does on the side, until it is cancelled."""

    async def close(self) -> None: ...


class _Held(msgspec.Struct, frozen=True, gc=False):
    """A handle while it waits, packed: a hundred thousand of them are held."""

    key: str
    leg: str
    engine: str
    expires: float
    packed: bytes

    @property
    def size(self) -> int:
        """Bytes of memory it is counted with."""
        return len(self.packed) + HANDLE_OVERHEAD

    def handle(self) -> Handle:
        bare = unpack(self.packed)
        return msgspec.structs.replace(bare, key=self.key, leg=self.leg, engine=self.engine)


def _hold(handle: Handle) -> _Held:
    bare = msgspec.structs.replace(handle, key="", leg="", engine="")
    # The encoder's own bytes are cut from a longer buffer, whose end would lie idle.
    packed = bytes(memoryview(bare.pack()))
    return _Held(handle.key, handle.leg, handle.engine, handle.expires, packed)


class MemoryStore:
    """The store of one router, bounded by handles and bytes.

    An expired handle stays for another ``ttl`` so that its turn can be told that it expired
    and goes where its history was; it is never handed out.
    """

    def __init__(
        self, *, ttl: float, capacity: int, max_bytes: int, branches: int, on_drop: OnDrop
    ) -> None:
        self._ttl = ttl
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._branches = branches
        self._on_drop = on_drop
        self._by_key: dict[str, str | tuple[str, ...]] = {}
        """Ids by key, the oldest first; most keys have one."""
        self._by_age: OrderedDict[str, _Held] = OrderedDict()
        self._claimed: dict[str, Handle] = {}
        self._bytes = 0

    async def find(self, keys: Sequence[str]) -> list[Handle]:
        for key in keys:
            if ids := self._ids(key):
                return [self._by_age[id].handle() for id in reversed(ids)]
        return []

    async def claim(self, handle: Handle) -> bool:
        if handle.id not in self._by_age or not handle.live():
            return False
        self._remove(handle.id)
        self._claimed[handle.id] = handle
        return True

    async def restore(self, handle: Handle) -> None:
        # A handle whose leg was lost meanwhile is no longer among the claimed.
        if self._claimed.pop(handle.id, None) is not None:
            self._add(handle)

    async def commit(self, handle: Handle) -> None:
        self._claimed.pop(handle.id, None)

    def put(self, handle: Handle) -> None:
        self._add(handle)
        while len(ids := self._ids(handle.key)) > self._branches:
            self._forget(ids[0], "replaced")
        while len(self._by_age) > self._capacity or self._bytes > self._max_bytes:
            self._forget(self._oldest(), "evicted")
        forgotten = time.time() - self._ttl
        while self._by_age and self._by_age[self._oldest()].expires < forgotten:
            self._forget(self._oldest(), "expired")

    async def drop_leg(self, leg: str, reason: str, keep_engine: str | None = None) -> int:
        def lost(handle: Handle | _Held) -> bool:
            return handle.leg == leg and handle.engine != keep_engine

        for handle in [handle for handle in self._claimed.values() if lost(handle)]:
            del self._claimed[handle.id]
        gone = [id for id, held in self._by_age.items() if lost(held)]
        for id in gone:
            self._forget(id, reason)
        return len(gone)

    async def drop(self, handles: Iterable[Handle], reason: str) -> None:
        for handle in handles:
            if handle.id in self._by_age:
                self._forget(handle.id, reason)

    async def newest(self, start: int, count: int) -> list[Handle]:
        held = islice(reversed(self._by_age.values()), start, start + count)
        return [one.handle() for one in held]

    def last_here(self) -> Iterable[Handle]:
        return (held.handle() for held in self._by_age.values())

    def held(self) -> Mapping[str, int]:
        now = time.time()
        count: dict[str, int] = {}
        for held in self._by_age.values():
            if now < held.expires:
                count[held.leg] = count.get(held.leg, 0) + 1
        return count

    def bytes_held(self) -> int:
        return self._bytes

    async def watch(self) -> None:
        return None

    async def close(self) -> None:
        return None

    def _ids(self, key: str) -> tuple[str, ...]:
        ids = self._by_key.get(key, ())
        return (ids,) if isinstance(ids, str) else ids

    def _oldest(self) -> str:
        return next(iter(self._by_age))

    def _add(self, handle: Handle) -> None:
        if handle.id in self._by_age:
            self._remove(handle.id)
        held = self._by_age[handle.id] = _hold(handle)
        ids = self._ids(handle.key)
        self._by_key[handle.key] = (*ids, handle.id) if ids else handle.id
        self._bytes += held.size

    def _remove(self, id: str) -> _Held:
        held = self._by_age.pop(id)
        ids = tuple(other for other in self._ids(held.key) if other != id)
        if ids:
            self._by_key[held.key] = ids if len(ids) > 1 else ids[0]
        else:
            del self._by_key[held.key]
        self._bytes -= held.size
        return held

    def _forget(self, id: str, reason: str) -> None:
        self._on_drop(self._remove(id).handle(), reason)
