"""HTTP to the legs, with every wait bounded and every failure named by its leg."""

import asyncio
import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp

from pd_router.legs import Leg

CONNECT_SECONDS = 5.0
"""Bound of a TCP connect to a leg."""

# Below uvicorn's 5 s, so that the router closes an idle connection before the engine does.
_KEEP_ALIVE_SECONDS = 3.0


class LegFailure(Exception):
    """A leg did not answer. ``reason`` names no address."""

    def __init__(self, leg: Leg, reason: str) -> None:
        super().__init__(f"{leg.name}: {reason}")
        self.leg = leg
        self.reason = reason


class NotReached(LegFailure):
    """No connection came about: the leg has seen nothing of the request."""


class Broken(LegFailure):
    """The connection broke; how much of the request the leg has seen is unknown."""


class TimedOut(LegFailure):
    """The leg was reached and stayed silent for too long."""


@contextmanager
def leg_failures(leg: Leg) -> Iterator[None]:
    """Turn the HTTP client's exceptions into :class:`LegFailure`."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise NotReached(leg, "connect timed out") from error
    except aiohttp.ClientConnectorDNSError as error:
        raise NotReached(leg, "host name not resolved") from error
    except aiohttp.ClientConnectorError as error:
        refused = error.os_error.errno == errno.ECONNREFUSED
        reason = "connection refused" if refused else "connection failed"
        raise NotReached(leg, reason) from error
    except asyncio.TimeoutError as error:
        raise TimedOut(leg, "no answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Broken(leg, "connection broke") from error


class Engines:
    """The HTTP client of all legs."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            # A compressed stream could not be forwarded as it arrives.
            headers={"Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(
        self,
        leg: Leg,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        total: float | None = None,
        idle: float | None = None,
    ) -> aiohttp.ClientResponse:
        """An answer whose body is still to be read; the caller closes it.

        ``total`` bounds the whole exchange, ``idle`` each wait for bytes, in seconds.
        Raises :class:`LegFailure`.
        """
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_SECONDS, sock_read=idle)
        with leg_failures(leg):
            return await self._session.post(
                leg.url + path,
                data=body,
                headers={"Content-Type": "application/json", **headers},
                timeout=timeout,
                allow_redirects=False,
            )

    async def fetch(
        self, leg: Leg, path: str, body: bytes, headers: Mapping[str, str], *, total: float
    ) -> tuple[int, bytes]:
        """Status and body of a whole answer. Raises :class:`LegFailure`."""
        answer = await self.post(leg, path, body, headers, total=total)
        try:
            return answer.status, await read_all(leg, answer)
        finally:
            answer.close()

    async def get(
        self, leg: Leg, path: str, headers: Mapping[str, str], *, total: float
    ) -> tuple[int, bytes]:
        """Status and body. Raises :class:`LegFailure`."""
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_SECONDS)
        with leg_failures(leg):
            async with self._session.get(
                leg.url + path, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                return answer.status, await answer.read()


async def read_all(leg: Leg, answer: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises :class:`LegFailure`."""
    with leg_failures(leg):
        return await answer.read()


async def read_some(leg: Leg, answer: aiohttp.ClientResponse) -> bytes:
    """The next bytes as they arrive, empty at the end. Raises :class:`LegFailure`."""
    with leg_failures(leg):
        return await answer.content.readany()
