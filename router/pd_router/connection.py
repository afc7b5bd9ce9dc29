"""A client's connection, where aiohttp has a way of its own and no setting for it."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import HttpVersion11, hdrs, web

from pd_router.errors import error_response

GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"

_LOOK_SECONDS = (0.01, 0.1, 0.5)
"""After how long it is looked whether a client that sends no more has gone; then every so often
as the last says."""
_TCP_CLOSE = 7
"""In tcp_info's first byte (Linux, include/net/tcp_states.h)."""


class Server(web.Server):
    """Makes the connections."""

    stall_seconds: Callable[[], float]
    """How long a client may take nothing of what waits for it."""

    @classmethod
    def take_over(cls, server: web.Server, stall_seconds: Callable[[], float]) -> None:
        """Have ``server``, which aiohttp has made, make such connections."""
        server.__class__ = cls
        assert isinstance(server, cls)
        server.stall_seconds = stall_seconds

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self.stall_seconds(), loop=self._loop, **self._kwargs)


class Connection(web.RequestHandler):
    """One client's."""

    __slots__ = ("_asked", "_stall_seconds")

    def __init__(self, server: Server, stall_seconds: float, **named: Any) -> None:
        super().__init__(server, **named)
        self._stall_seconds = stall_seconds
        self._asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # The kernel drops a client that takes nothing, of an answer's last bytes either.
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = min(int(self._stall_seconds * 1000), 2**31 - 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What no handler sees is answered as everything else is."""
        super().handle_error(request, status, exc, message)
        if status < 500:
            # What follows are the client's own bytes.
            reason = (message or "").partition(":")[0].partition("\n")[0].rstrip(".")
            message = f"The request cannot be read: {reason}."
            answer = error_response(status, message, "invalid_request_error")
        else:
            answer = error_response(status, "The router failed.", "internal_error")
        answer.force_close()
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """A request in chunks is the last one of its connection: aiohttp's parser takes the last
        of its trailers for a header of the next request, which may be another client's. So is one
        of HTTP/1.0 whose answer ends nowhere else."""
        endless = request.version < HttpVersion11 and resp.content_length is None
        if endless or hdrs.TRANSFER_ENCODING in request.headers:
            self.close()
            if not resp.prepared:
                resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it has gone, or waits for its answer. Whether the connection
        stays.

        What it is cannot be seen before something is sent to it, and a client that has gone is
        not to keep two engines busy until there is an answer.
        """
        transport = self.transport
        if transport is None or transport.get_extra_info("sslcontext") is not None:
            return False
        if self._idle() or self._begun():
            return False
        self.close()  # After this answer.
        self._look_later(0)
        return True

    def _idle(self) -> bool:
        """No request has come."""
        return self._waiter is not None and not self._waiter.done()

    def _begun(self) -> bool:
        """The client has got a part of its answer."""
        request = self._current_request
        return request is not None and request.writer.output_size > 0

    def _look_later(self, times: int) -> None:
        after = _LOOK_SECONDS[min(times, len(_LOOK_SECONDS) - 1)]
        self._loop.call_later(after, self._look, times)

    def _look(self, times: int) -> None:
        transport, request = self.transport, self._current_request
        if transport is None or transport.is_closing() or self._begun():
            return
        if request is not None:
            if not request.content.is_eof() or request.version < HttpVersion11:
                transport.abort()
                return
            if not self._asked:
                self._asked = True
                transport.write(GO_ON)  # A client that has gone refuses it.
            elif _has_gone(transport):
                transport.abort()
                return
        elif self._idle():
            transport.close()
            return
        self._look_later(times + 1)


def _has_gone(transport: asyncio.BaseTransport) -> bool:
    """The other end has refused what it was sent."""
    connection = transport.get_extra_info("socket")
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return True
    return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)
