"""A connection's socket beneath its transport, where the transport stands in the way."""

import asyncio
import contextlib
import os


def plain_socket(transport: asyncio.BaseTransport) -> int | None:
    """The number of a connection's socket; None if it is encrypted or on its end."""
    if transport.is_closing() or transport.get_extra_info("sslcontext") is not None:
        return None
    return int(transport.get_extra_info("socket").fileno())


def send_now(transport: asyncio.WriteTransport, data: bytes) -> None:
    """``transport.write``, but at once: uvloop's waits until all callbacks that are due have run,
    other turns' among them."""
    number = plain_socket(transport) if transport.get_write_buffer_size() == 0 else None
    sent = 0
    if number is not None:
        with contextlib.suppress(OSError):  # The transport meets it, too, and tells.
            sent = os.write(number, data)
    if sent < len(data):
        transport.write(data[sent:] if sent else data)
