"""A request's body: in time, within the limit, and uncompressed."""

import asyncio
import zlib

from aiohttp import HttpVersion11, hdrs, web

from pd_router.connection import GO_ON
from pd_router.errors import TurnError, bad_request
from pd_router.settings import Settings

CODINGS = "gzip, deflate"
"""Of ``Content-Encoding``, as ``Accept-Encoding`` tells them."""

_PLAIN = frozenset({"", "identity"})
_GZIP = frozenset({"gzip", "x-gzip"})
_DEFLATE = "deflate"
_AT_ONCE = 4096
"""Compressed bytes that are read on the spot: no more than some 4 MB come of them."""


async def read_body(request: web.Request, settings: Settings) -> bytes:
    """A request's body.

    Raises :class:`TurnError`: 413 for too large a one, 408 for one that does not arrive, 415 for
    a ``Content-Encoding`` that is not known, 417 for such an ``Expect``, 400 for a body that is
    something else.
    """
    most = settings.max_body_bytes
    if request.content_length is not None and request.content_length > most:
        raise _too_large()
    coding = _coding(request)
    _answer_expectation(request)
    if request.content.is_eof():
        raw = await request.read()  # All there already, as usual: nothing to wait for.
    else:
        try:
            raw = await asyncio.wait_for(request.read(), settings.body_timeout)
        except asyncio.TimeoutError:
            message = "The request body did not arrive."
            raise TurnError(408, message, "invalid_request_error") from None
    if coding in _PLAIN or not raw:
        return raw
    if len(raw) <= _AT_ONCE:
        return _decompressed(raw, coding, most)
    return await asyncio.to_thread(_decompressed, raw, coding, most)


async def expect_later(request: web.Request) -> None:
    """Let :func:`read_body` answer the request's ``Expect``: by then it is known whether the body
    is wanted at all."""


def _answer_expectation(request: web.Request) -> None:
    expected = request.headers.get(hdrs.EXPECT, "").lower()
    if not expected or request.version < HttpVersion11:
        return
    if expected != "100-continue":
        raise TurnError(417, "No such expectation is met here.", "invalid_request_error")
    if request.transport is not None and not request.content.is_eof():
        request.transport.write(GO_ON)


def _coding(request: web.Request) -> str:
    if hdrs.CONTENT_ENCODING not in request.headers:
        return ""
    coding = ", ".join(request.headers.getall(hdrs.CONTENT_ENCODING)).strip().lower()
    if coding in _PLAIN or coding in _GZIP or coding == _DEFLATE:
        return coding
    raise TurnError(
        415,
        f"The request body's Content-Encoding is none of {CODINGS}.",
        "invalid_request_error",
        headers={"Accept-Encoding": CODINGS},
    )


def _decompressed(raw: bytes, coding: str, most: int) -> bytes:
    if coding in _GZIP:
        window = 16 + zlib.MAX_WBITS
    else:
        # Some clients leave out the header; the first byte tells (RFC 1950, CM).
        window = zlib.MAX_WBITS if raw[0] & 15 == 8 else -zlib.MAX_WBITS
    decompressor = zlib.decompressobj(window)
    try:
        body = decompressor.decompress(raw, most + 1)
    except zlib.error:
        raise _is_not(coding) from None
    if len(body) > most:
        raise _too_large()
    if not decompressor.eof or decompressor.unused_data:
        raise _is_not(coding)
    return body


def _is_not(coding: str) -> TurnError:
    return bad_request(f"The request body is not {coding}.")


def _too_large() -> TurnError:
    return TurnError(413, "The request body is too large.", "invalid_request_error")
