"""HTTP to the legs, with every wait bounded and every failure named by its leg."""

import asyncio
import socket
from collections.abc import Mapping

from pd_router.enginehttp import Connection, Origin
from pd_router.legs import Leg

CONNECT_SECONDS = 5.0
"""Bound of a TCP connect to a leg."""


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


def _not_reached(leg: Leg, error: Exception) -> NotReached:
    if isinstance(error, asyncio.TimeoutError):
        return NotReached(leg, "connect timed out")
    if isinstance(error, socket.gaierror):
        return NotReached(leg, "host name not resolved")
    if isinstance(error, ConnectionRefusedError):
        return NotReached(leg, "connection refused")
    return NotReached(leg, "connection failed")


def failed(leg: Leg, error: Exception) -> LegFailure:
    """What an :class:`OSError` or a timeout after the connect is to whoever asked the leg."""
    if isinstance(error, asyncio.TimeoutError):
        return TimedOut(leg, "no answer in time")
    return Broken(leg, "connection broke")


class EngineAnswer:
    """An answer whose head has arrived; :meth:`close` ends it, read or not."""

    def __init__(self, leg: Leg, connection: Connection) -> None:
        self.leg = leg
        self.status = connection.status
        self.headers = connection.headers
        """Names in lower case."""
        self._connection = connection

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def connection(self) -> Connection:
        return self._connection

    async def read(self) -> bytes:
        """The whole body. Raises :class:`LegFailure`."""
        try:
            return await self._connection.read()
        except (asyncio.TimeoutError, OSError) as error:
            raise failed(self.leg, error) from error

    def close(self) -> None:
        """Give the connection back, or drop it if the answer is not whole."""
        self._connection.close()


class Engines:
    """The HTTP client of all legs."""

    def __init__(self) -> None:
        self._origins: dict[str, Origin] = {}

    async def close(self) -> None:
        for origin in self._origins.values():
            origin.close()

    def forget(self, leg: Leg) -> None:
        """Drop the idle connections to a leg that is gone."""
        origin = self._origins.pop(leg.url, None)
        if origin is not None:
            origin.close()

    async def post(
        self,
        leg: Leg,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        total: float | None = None,
        idle: float | None = None,
    ) -> EngineAnswer:
        """An answer whose body is still to be read; the caller closes it.

        ``total`` bounds the whole exchange, ``idle`` each wait for bytes, in seconds.
        Raises :class:`LegFailure`.
        """
        named = {"Content-Type": "application/json", **headers}
        return await self.send(leg, "POST", path, named, body, total=total, idle=idle)

    async def fetch(
        self, leg: Leg, path: str, body: bytes, headers: Mapping[str, str], *, total: float
    ) -> tuple[int, bytes]:
        """Status and body of a whole answer. Raises :class:`LegFailure`."""
        answer = await self.post(leg, path, body, headers, total=total)
        try:
            return answer.status, await answer.read()
        finally:
            answer.close()

    async def get(
        self, leg: Leg, path: str, headers: Mapping[str, str], *, total: float
    ) -> tuple[int, bytes]:
        """Status and body. Raises :class:`LegFailure`."""
        answer = await self.send(leg, "GET", path, headers, None, total=total)
        try:
            return answer.status, await answer.read()
        finally:
            answer.close()

    async def send(
        self,
        leg: Leg,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        total: float | None = None,
        idle: float | None = None,
    ) -> EngineAnswer:
        """:meth:`post` for any method."""
        origin = self._origin(leg)
        request = origin.request(method, path, headers, body)
        connection = origin.idle_connection()
        if connection is None:
            try:
                connection = await origin.connect(CONNECT_SECONDS)
            except (asyncio.TimeoutError, OSError) as error:
                raise _not_reached(leg, error) from error
        try:
            connection.bound(total, idle)
            await connection.ask(request)
        except (asyncio.TimeoutError, OSError) as error:
            connection.close()
            raise failed(leg, error) from error
        except BaseException:
            connection.close()
            raise
        return EngineAnswer(leg, connection)

    def _origin(self, leg: Leg) -> Origin:
        origin = self._origins.get(leg.url)
        if origin is None:
            origin = self._origins[leg.url] = Origin(leg.url)
        return origin


async def read_all(leg: Leg, answer: EngineAnswer) -> bytes:
    """The whole body. Raises :class:`LegFailure`."""
    return await answer.read()
