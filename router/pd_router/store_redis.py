"""Handles held in Redis or Valkey, for several routers behind one balancer.

Every change is one script on the server, so that two routers never get the same handle. A
router that dies between claim and commit takes its claimed handles with it. When the server
does not answer in time, turns go on without reuse.

Keys, all with one hash tag so that they share a slot of a cluster:

    {pd:NAME}:h:ID      hash raw, key, leg, engine, expires; gone some time after it expires
    {pd:NAME}:k:KEY     sorted set of ids by time of arrival: the branches of a conversation
    {pd:NAME}:l:LEG     sorted set of ids by time of expiry
    {pd:NAME}:age       sorted set of all ids by time of arrival
    {pd:NAME}:c:ID      a claimed handle, the same hash
    {pd:NAME}:cl:LEG    set of claimed ids
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError

from pd_router.handles import Handle, OnDrop, unpack

log = logging.getLogger("pd_router")

_PAUSE_SECONDS = 1.0
"""How long the store is left alone after it did not answer."""
_COUNT_SECONDS = 2.0
_CLAIM_SECONDS = 3600
_CONNECTIONS = 32

_COMMON = """
local p = KEYS[1]
local function forget(id)
  local h = redis.call('HMGET', p..':h:'..id, 'raw', 'key', 'leg')
  redis.call('ZREM', p..':age', id)
  if h[1] then
    redis.call('DEL', p..':h:'..id)
    redis.call('ZREM', p..':k:'..h[2], id)
    redis.call('ZREM', p..':l:'..h[3], id)
  end
  return h[1]
end
local function add(id, raw, key, leg, engine, born, expires, keep_ms)
  redis.call('HSET', p..':h:'..id, 'raw', raw, 'key', key, 'leg', leg, 'engine', engine,
             'expires', expires, 'born', born)
  redis.call('PEXPIRE', p..':h:'..id, keep_ms)
  redis.call('ZADD', p..':k:'..key, born, id)
  redis.call('PEXPIRE', p..':k:'..key, keep_ms)
  redis.call('ZADD', p..':l:'..leg, expires, id)
  redis.call('ZADD', p..':age', born, id)
end
"""

# id, raw, key, leg, engine, born, expires, keep_ms, now, branches, capacity
_PUT = """
add(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8])
redis.call('ZREMRANGEBYSCORE', p..':l:'..ARGV[4], '-inf', ARGV[9])
local gone = {}
local function cut(name, most, reason)
  local over = redis.call('ZCARD', name) - most
  if over > 0 then
    for _, id in ipairs(redis.call('ZRANGE', name, 0, over - 1)) do
      local raw = forget(id)
      redis.call('ZREM', name, id)
      if raw then table.insert(gone, reason); table.insert(gone, raw) end
    end
  end
end
cut(p..':k:'..ARGV[3], tonumber(ARGV[10]), 'replaced')
cut(p..':age', tonumber(ARGV[11]), 'evicted')
return gone
"""

_FIND = """
for _, key in ipairs(ARGV) do
  local found = {}
  for _, id in ipairs(redis.call('ZREVRANGE', p..':k:'..key, 0, -1)) do
    local raw = redis.call('HGET', p..':h:'..id, 'raw')
    if raw then
      table.insert(found, raw)
    else
      redis.call('ZREM', p..':k:'..key, id)
    end
  end
  if #found > 0 then return found end
end
return {}
"""

# id, now, seconds a claim is remembered
_CLAIM = """
local h = redis.call('HMGET', p..':h:'..ARGV[1], 'raw', 'key', 'leg', 'engine', 'expires', 'born')
if not h[1] or tonumber(h[5]) <= tonumber(ARGV[2]) then return 0 end
forget(ARGV[1])
redis.call('HSET', p..':c:'..ARGV[1], 'raw', h[1], 'key', h[2], 'leg', h[3], 'engine', h[4],
           'expires', h[5], 'born', h[6])
redis.call('EXPIRE', p..':c:'..ARGV[1], ARGV[3])
redis.call('SADD', p..':cl:'..h[3], ARGV[1])
redis.call('EXPIRE', p..':cl:'..h[3], ARGV[3])
return 1
"""

# id, keep_ms, 1 to put it back
_SETTLE = """
local h = redis.call('HMGET', p..':c:'..ARGV[1], 'raw', 'key', 'leg', 'engine', 'expires', 'born')
if not h[1] then return 0 end
redis.call('DEL', p..':c:'..ARGV[1])
redis.call('SREM', p..':cl:'..h[3], ARGV[1])
if ARGV[3] == '1' then add(ARGV[1], h[1], h[2], h[3], h[4], h[6], h[5], ARGV[2]) end
return 1
"""

# leg, engine to keep ('' for none)
_DROP_LEG = """
local gone = {}
for _, id in ipairs(redis.call('ZRANGE', p..':l:'..ARGV[1], 0, -1)) do
  local engine = redis.call('HGET', p..':h:'..id, 'engine')
  if not engine or ARGV[2] == '' or engine ~= ARGV[2] then
    local raw = forget(id)
    redis.call('ZREM', p..':l:'..ARGV[1], id)
    if raw then table.insert(gone, raw) end
  end
end
for _, id in ipairs(redis.call('SMEMBERS', p..':cl:'..ARGV[1])) do
  if ARGV[2] == '' or redis.call('HGET', p..':c:'..id, 'engine') ~= ARGV[2] then
    redis.call('DEL', p..':c:'..id)
    redis.call('SREM', p..':cl:'..ARGV[1], id)
  end
end
return gone
"""

_DROP = """
local gone = {}
for _, id in ipairs(ARGV) do
  local raw = forget(id)
  if raw then table.insert(gone, raw) end
end
return gone
"""

# from, to: of all ids, the newest first
_LIST = """
local found = {}
for _, id in ipairs(redis.call('ZREVRANGE', p..':age', ARGV[1], ARGV[2])) do
  local raw = redis.call('HGET', p..':h:'..id, 'raw')
  if raw then table.insert(found, raw) else redis.call('ZREM', p..':age', id) end
end
return found
"""


class RedisStore:
    """A :class:`~pd_router.handles.HandleStore` that several routers share."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        ttl: float,
        capacity: int,
        branches: int,
        legs: Callable[[], Sequence[str]],
        on_drop: OnDrop,
        answer_seconds: float,
    ) -> None:
        """``name`` is the deployment's: routers of one name share their handles.
        ``legs`` tells the decode legs. A turn waits ``answer_seconds`` for the store."""
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=answer_seconds,
            socket_timeout=answer_seconds,
            socket_connect_timeout=answer_seconds,
        )
        self._redis = Redis(connection_pool=pool)
        self._where = urlsplit(url).hostname
        self._prefix = f"{{pd:{name}}}"
        self._ttl = ttl
        self._capacity = capacity
        self._branches = branches
        self._on_drop = on_drop
        self._legs = legs
        self._held: dict[str, int] = {}
        self._answer_seconds = answer_seconds
        self._silent_until = 0.0
        scripts = {
            "put": _PUT,
            "find": _FIND,
            "claim": _CLAIM,
            "settle": _SETTLE,
            "drop_leg": _DROP_LEG,
            "drop": _DROP,
            "list": _LIST,
        }
        self._scripts = {
            name: self._redis.register_script(_COMMON + script) for name, script in scripts.items()
        }

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def find(self, keys: Sequence[str]) -> list[Handle]:
        return _handles(await self._run("find", *keys) or ()) if keys else []

    async def claim(self, handle: Handle) -> bool:
        return bool(await self._run("claim", handle.id, time.time(), _CLAIM_SECONDS))

    async def restore(self, handle: Handle) -> None:
        await self._run("settle", handle.id, self._keep_ms(handle), 1)

    async def commit(self, handle: Handle) -> None:
        await self._run("settle", handle.id, 0, 0)

    def put(self, handle: Handle) -> Awaitable[None]:
        return self._put(handle)

    async def _put(self, handle: Handle) -> None:
        gone = await self._run(
            "put",
            handle.id,
            handle.pack(),
            handle.key,
            handle.leg,
            handle.engine,
            handle.born,
            handle.expires,
            self._keep_ms(handle),
            time.time(),
            self._branches,
            self._capacity,
        )
        for reason, raw in zip((gone or ())[::2], (gone or ())[1::2], strict=True):
            self._dropped([raw], reason.decode())

    async def drop_leg(self, leg: str, reason: str, keep_engine: str | None = None) -> int:
        gone = await self._run("drop_leg", leg, keep_engine or "")
        return self._dropped(gone or (), reason)

    async def drop(self, handles: Iterable[Handle], reason: str) -> None:
        if ids := [handle.id for handle in handles]:
            self._dropped(await self._run("drop", *ids) or (), reason)

    async def newest(self, start: int, count: int) -> list[Handle]:
        """Held handles, the newest first, ``start`` of them left out."""
        return _handles(await self._run("list", start, start + count - 1) or ())

    def last_here(self) -> Iterable[Handle]:
        """None: other routers, or this one when it starts again, find them all."""
        return ()

    def held(self) -> Mapping[str, int]:
        return self._held

    def bytes_held(self) -> int:
        """None of them in this process."""
        return 0

    async def watch(self) -> None:
        """Keep :meth:`held` up to date."""
        while True:
            for leg in self._legs():
                name = f"{self._prefix}:l:{leg}"
                count = await self._guarded(self._redis.zcount(name, time.time(), "+inf"))
                self._held[leg] = count or 0
            await asyncio.sleep(_COUNT_SECONDS)

    def _keep_ms(self, handle: Handle) -> int:
        """An expired handle stays for another ``ttl``, so that its turn can be told."""
        return max(int((handle.expires - time.time() + self._ttl) * 1000), 1)

    def _dropped(self, gone: Iterable[bytes], reason: str) -> int:
        handles = _handles(gone)
        for handle in handles:
            self._on_drop(handle, reason)
        return len(handles)

    async def _run(self, script: str, *args: Any) -> Any:
        return await self._guarded(self._scripts[script](keys=[self._prefix], args=args))

    async def _guarded(self, work: Awaitable[Any]) -> Any:
        """The server's answer; None if there is none in time."""
        if time.monotonic() < self._silent_until:
            work.close()  # type: ignore[attr-defined]
            return None
        try:
            return await asyncio.wait_for(work, self._answer_seconds)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            self._silent_until = time.monotonic() + _PAUSE_SECONDS
            log.warning(
                "no reuse for now: the store at %s does not answer (%s)",
                self._where,
                type(error).__name__,
            )
            return None


def _handles(raws: Iterable[bytes]) -> list[Handle]:
    """Those that this version of the router can read."""
    found = []
    for raw in raws:
        try:
            found.append(unpack(raw))
        except (msgspec.DecodeError, ValueError):
            log.warning("a handle in the store is not readable")
    return found
