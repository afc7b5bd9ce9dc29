"""From decode's socket to the client's, with no task between: one call for each read.

A client that reads slowly stops the reading from decode, so that what waits here stays
within the transports' buffers. What is plain is passed on by :mod:`pd_router.splicing`, where
there is that.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from pd_router.engines import EngineAnswer, LegFailure, failed
from pd_router.relay import StreamRelay
from pd_router.sockets import plain_socket
from pd_router.splicing import Splice, Splices, client_has_gone
from pd_router.sse import EventTooLarge

if TYPE_CHECKING:
    from pd_router._splice import Report

HIGH_WATER = 64 << 10
"""Bytes waiting for a client above which decode is no longer read."""

_TAIL_SECONDS = 0.01
"""How long the last events wait for the end of the body; it nearly always comes at once."""


class ClientStalled(ConnectionResetError):
    """The client took nothing for too long, and its connection was dropped."""


class Interrupted(LegFailure):
    """The router itself ends the stream."""


_open: "set[StreamPipe]" = set()


def open_pipes() -> "list[StreamPipe]":
    """Streams that are under way."""
    return list(_open)


class StreamPipe:
    """One streamed answer on its way."""

    def __init__(
        self,
        answer: EngineAnswer,
        relay: StreamRelay,
        writer: AbstractStreamWriter,
        *,
        chunked: bool,
        stall_seconds: float,
        on_first: Callable[[], None],
        splices: Splices | None,
    ) -> None:
        """``writer`` has sent its headers; ``chunked`` says how its body is framed."""
        transport = writer.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self._transport = transport
        self._answer = answer
        self._engine = answer.connection
        self._relay = relay
        self._writer = writer
        self._chunked = chunked
        self._stall_seconds = stall_seconds
        self._on_first: Callable[[], None] | None = on_first
        self._tail = b""
        """The last events: they go with the end of the body, in one write, if it comes soon."""
        self._tail_timer: asyncio.TimerHandle | None = None
        self._draining: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._splices = splices if chunked else None
        self._splice: Splice | None = None
        self._splice_asked = False
        self.task: asyncio.Task[object] | None = None
        """Who waits for it."""

    async def run(self) -> None:
        """Pass the stream on until decode has ended it.

        Raises :class:`~pd_router.engines.LegFailure`, :class:`~pd_router.sse.EventTooLarge`
        or, when the client has gone, :class:`ConnectionResetError`.
        """
        self.task = asyncio.current_task()
        _open.add(self)
        try:
            self._engine.attach(self._take)
            await self._engine.end
        except Exception as error:
            if self._failure is None:
                if isinstance(error, asyncio.TimeoutError | OSError):
                    raise failed(self._answer.leg, error) from error
                raise
        finally:
            _open.discard(self)
            if self._draining is not None:
                self._draining.cancel()
            self._stop_splice()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # Else they would keep each other.

    def interrupt(self, reason: str) -> None:
        """End the stream as if its leg had failed for ``reason``."""
        self._give_up(Interrupted(self._answer.leg, reason))

    async def finish(self, response: web.StreamResponse) -> None:
        """End the client's body, once it has taken what waits for it."""
        end = response.write_eof(self._take_tail())
        if not self._transport.get_write_buffer_size():
            await end  # Nothing to wait for.
            return
        try:
            await asyncio.wait_for(end, self._stall_seconds)
        except asyncio.TimeoutError:
            self._transport.abort()
            raise ClientStalled("the client reads nothing") from None

    def write(self, data: bytes) -> None:
        """Send bytes of the body to the client."""
        data = self._take_tail() + data
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(data)

    def _take_tail(self) -> bytes:
        tail, self._tail = self._tail, b""
        if self._tail_timer is not None:
            self._tail_timer.cancel()
            self._tail_timer = None
        return tail

    def _flush(self) -> None:
        if self._tail and not self._transport.is_closing():
            self.write(b"")

    def _take(self, piece: bytes) -> None:
        try:
            events = self._relay.feed(piece)
        except EventTooLarge as error:
            self._give_up(error)
            return
        if not events:
            return
        if self._transport.is_closing():
            self._give_up(ConnectionResetError("the client has gone"))
            return
        if self._relay.done:
            if self._tail_timer is None:
                loop = asyncio.get_running_loop()
                self._tail_timer = loop.call_later(_TAIL_SECONDS, self._flush)
            self._tail += events
        else:
            self.write(events)
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        if self._transport.get_write_buffer_size() > HIGH_WATER and self._draining is None:
            self._engine.pause()
            self._draining = asyncio.create_task(self._drain())
        if events is piece and self._splices is not None and not self._splice_asked:
            # What is written now reaches the socket before the loop's next round.
            self._splice_asked = True
            asyncio.get_running_loop().call_soon(self._begin_splice, self._splices)

    def _begin_splice(self, splices: Splices) -> None:
        self._splice_asked = False
        # Once it is over its connection may have begun with another answer.
        if self not in _open or self._failure is not None or self._engine.whole:
            return
        written = not (self._tail or self._transport.get_write_buffer_size())
        if not written or self._draining is not None:
            return
        marks, source = self._relay.marks, self._engine.boundary()
        target = plain_socket(self._transport)
        if marks is None or source is None or target is None:
            return
        try:
            splice = splices.begin(source, target, marks, self._relay.notes, self._on_report)
        except OSError:
            return  # No more file descriptors: then it goes on in Python.
        self._splice = splice
        self._engine.lend(splice.silence)

    def _on_report(self, report: "Report") -> None:
        _, reason, unsent, rest, seen = report
        self._relay.note_passed(seen)
        if not reason:
            return
        self._splice = None
        if client_has_gone(report):
            self._give_up(ConnectionResetError("the client has gone"))
            self._transport.abort()
            return
        self._send_rest(unsent)
        self._engine.take_back(rest)

    def _stop_splice(self) -> None:
        splice, self._splice = self._splice, None
        report = None if splice is None else splice.stop()
        if report is not None:
            self._send_rest(report[2])

    def _send_rest(self, unsent: bytes) -> None:
        """Of a chunk the client may have the beginning."""
        if not self._transport.is_closing():
            self._transport.write(unsent)

    def _give_up(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            asyncio.get_running_loop().call_soon(self._engine.fail, failure)

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._writer.drain(), self._stall_seconds)
        except asyncio.TimeoutError:
            self._give_up(ClientStalled("the client reads nothing"))
            self._transport.abort()
            return
        except OSError:
            return  # The client has gone, and with it its turn.
        self._draining = None
        self._engine.resume()


async def open_pipe(
    request: web.Request,
    response: web.StreamResponse,
    answer: EngineAnswer,
    relay: StreamRelay,
    *,
    stall_seconds: float,
    on_first: Callable[[], None],
    splices: Splices | None,
) -> StreamPipe:
    """Send ``response``'s headers and make the pipe of its body.

    Raises :class:`ConnectionResetError` when the client has gone.
    """
    writer = await response.prepare(request)
    assert writer is not None
    writer.send_headers()
    return StreamPipe(
        answer,
        relay,
        writer,
        chunked=response.headers.get("Transfer-Encoding") == "chunked",
        stall_seconds=stall_seconds,
        on_first=on_first,
        splices=splices,
    )
