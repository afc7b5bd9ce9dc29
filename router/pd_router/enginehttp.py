"""HTTP/1.1 to one engine: connections, and one exchange at a time on each.

Bytes of an answer go from the socket to whoever takes them in one call, without a task or
a queue between; that is what makes a streamed chunk cheap.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools

from pd_router.sockets import plain_socket, send_now

MAX_HEAD = 64 << 10
"""Bytes of an answer's headers."""

# Below uvicorn's 5 s, so that the router closes an idle connection before the engine does.
_KEEP_ALIVE_SECONDS = 3.0

Sink = Callable[[bytes], None]


class Unanswered(ConnectionError):
    """The connection ended, or what came was not HTTP, before the answer was whole."""


class Connection(asyncio.Protocol):
    """A connection and its current exchange: :meth:`ask`, then :meth:`stream` or :meth:`read`."""

    def __init__(self, idle: "list[Connection]") -> None:
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parser: Any = None
        self._head: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._sink: Sink | None = None
        self._early: list[bytes] = []
        self._head_size = 0
        self._until_close = True
        self._whole = False
        self._reusable = False
        self._heard = 0.0
        self._paused = False
        self._chunked = self._in_chunk = False
        self._last = b""
        self._lent: Callable[[], float] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self.status = 0
        self.headers: dict[str, str] = {}

    # What an exchange is made of.

    async def ask(self, request: bytes) -> None:
        """Send a request and wait for the answer's head.

        Raises :class:`Unanswered`, or :class:`asyncio.TimeoutError` by :meth:`bound`.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._head = self._loop.create_future()
        self._end = self._failure = None
        self._sink, self._early = None, []
        self._whole = self._reusable = False
        if self._transport is None:
            raise Unanswered("closed")
        send_now(self._transport, request)
        await self._head

    async def stream(self, sink: Sink) -> None:
        """Give every piece of the body to ``sink`` as it arrives, until the body's end.

        Raises as :meth:`ask` does.
        """
        self.attach(sink)
        await self.end

    def attach(self, sink: Sink) -> None:
        """From now on ``sink`` gets the pieces of the body; it must not raise."""
        self._sink = sink
        early, self._early = self._early, []
        for piece in early:
            sink(piece)

    @property
    def end(self) -> "asyncio.Future[None]":
        """Done when the body is whole, or with what went wrong. To be awaited."""
        if self._end is None:
            self._end = self._loop.create_future()
            if self._failure is not None:
                self._end.set_exception(self._failure)
            elif self._whole:
                self._end.set_result(None)
        return self._end

    @property
    def whole(self) -> bool:
        """The body has arrived to its end."""
        return self._whole

    async def read(self) -> bytes:
        """The whole body. Raises as :meth:`ask` does."""
        if self._whole and self._sink is None:
            early, self._early = self._early, []
            return b"".join(early)
        pieces: list[bytes] = []
        await self.stream(pieces.append)
        return b"".join(pieces)

    def bound(self, total: float | None, idle: float | None) -> None:
        """End the exchange with a timeout after ``total`` seconds, or once nothing has arrived
        for ``idle`` seconds while it was being read."""
        if total is not None:
            self._deadline = self._loop.call_later(total, self.fail, asyncio.TimeoutError())
        if idle is not None:
            self._heard = self._loop.time()
            self._watch = self._loop.call_later(idle, self._look, idle)

    def _look(self, idle: float) -> None:
        if self._lent is not None:
            self._heard = self._loop.time() - self._lent()
        left = idle if self._paused else self._heard + idle - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look, idle)
        else:
            self.fail(asyncio.TimeoutError())

    def pause(self) -> None:
        """Read no more until :meth:`resume`; the engine feels the pressure."""
        if self._transport is not None and not self._whole:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._paused:
            self._paused = False
            self._heard = self._loop.time()
            self._transport.resume_reading()

    # The socket, lent to somebody who reads it without the event loop.

    def boundary(self) -> int | None:
        """The socket's number, if what comes next on it is the start of a chunk and it can be
        lent: it is not encrypted."""
        at_start = self._chunked and not self._in_chunk and self._last.endswith(b"\r\n")
        if self._whole or self._paused or not at_start or self._transport is None:
            return None
        return plain_socket(self._transport)

    def lend(self, silence: Callable[[], float]) -> None:
        """Read nothing until :meth:`take_back`; ``silence`` tells for how many seconds the
        engine has sent nothing."""
        self._lent = silence
        self._transport.pause_reading()

    def take_back(self, rest: bytes) -> None:
        """Go on from ``rest``, which was read and starts a chunk."""
        self._lent = None
        self._heard = self._loop.time()
        if self._transport is None:
            return
        if rest:
            self.data_received(rest)
        if self._transport is not None and not self._paused:
            self._transport.resume_reading()

    def close(self) -> None:
        """End the exchange. Its connection is kept if it can serve another one."""
        self._stop_clocks()
        self.resume()
        # What refers to the connection, or to what has been waiting for it, is let go: with no
        # cycle left a broken stream's memory is free at once.
        self._sink = self._lent = self._parser = None
        self._head = self._end = self._failure = None
        self._last = b""
        if self._transport is None:
            return
        if self._whole and self._reusable:
            self._expiry = self._loop.call_later(_KEEP_ALIVE_SECONDS, self.abort)
            self._idle.append(self)
        else:
            self.abort()

    def _stop_clocks(self) -> None:
        for timer in (self._watch, self._deadline):
            if timer is not None:
                timer.cancel()
        self._watch = self._deadline = None

    def abort(self) -> None:
        """Drop the connection; an engine that still works on the request stops."""
        self._stop_clocks()
        transport, self._transport = self._transport, None
        if transport is not None:
            self._forget()
            transport.abort()

    def take(self) -> bool:
        """Take the connection out of idleness; False if it has gone meanwhile."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        return self._transport is not None and not self._transport.is_closing()

    # What the event loop calls.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._whole:
            self.abort()
            return
        self._heard = self._loop.time()
        self._last = data
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail(Unanswered("not HTTP"))

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._forget()
        if self._head is not None and self._head.done() and self._until_close and exc is None:
            self._finish()
        else:
            self.fail(Unanswered("closed"))
        self._stop_clocks()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._whole:
            # Nobody has asked for it. The answer before it stands; the connection does not.
            raise httptools.HttpParserError("more than one answer")
        self.status, self.headers, self._head_size = 0, {}, 0
        self._until_close, self._chunked = True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._head_size > MAX_HEAD:
            raise httptools.HttpParserError("headers too large")
        key = name.decode("latin-1").lower()
        self.headers[key] = value.decode("latin-1")
        if key in ("content-length", "transfer-encoding"):
            self._until_close = False
            self._chunked = self.headers[key].lower() == "chunked"

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200 and self._head is not None and not self._head.done():
            self._head.set_result(None)

    def on_chunk_header(self) -> None:
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        self._in_chunk = False

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink(body)
        else:
            self._early.append(body)

    def on_message_complete(self) -> None:
        if self.status >= 200:
            # The parser forgets it once the message is over.
            self._reusable = self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        self._whole = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def fail(self, failure: Exception) -> None:
        if not self._whole and self._failure is None:
            self._failure = failure
        for future in (self._head, self._end):
            if future is not None and not future.done():
                future.set_exception(failure)
        self.abort()

    def _forget(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self in self._idle:
            self._idle.remove(self)


class Origin:
    """One engine's address, and its idle connections."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").encode()
        self._idle: list[Connection] = []
        self._fixed = b" HTTP/1.1\r\nHost: " + parts.netloc.encode() + b"\r\n"
        # A compressed stream could not be forwarded as it arrives.
        self._fixed += b"Accept-Encoding: identity\r\n"

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> bytes:
        """A request's bytes. Raises :class:`ValueError` for a header that is none."""
        lines = [method.encode(), b" ", self._path, path.encode(), self._fixed]
        for name, value in headers.items():
            line = f"{name}: {value}"
            if "\r" in line or "\n" in line or "\0" in line:
                raise ValueError(f"{name!r} is not a header")
            lines += [line.encode("latin-1"), b"\r\n"]
        if body is not None:
            lines.append(b"Content-Length: %d\r\n" % len(body))
        lines += [b"\r\n", body or b""]
        return b"".join(lines)

    def idle_connection(self) -> Connection | None:
        """A connection that is ready; None: there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.take():
                return connection
        return None

    async def connect(self, connect_seconds: float) -> Connection:
        """A new connection. Raises :class:`OSError` or :class:`asyncio.TimeoutError`."""
        loop = asyncio.get_running_loop()
        connect = loop.create_connection(
            lambda: Connection(self._idle), self._host, self._port, ssl=self._tls
        )
        _, made = await asyncio.wait_for(connect, connect_seconds)
        return made

    def close(self) -> None:
        """Drop the idle connections."""
        for connection in list(self._idle):
            connection.abort()
