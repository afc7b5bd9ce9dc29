"""Server-sent events: cutting a byte stream into events without changing a byte.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html (lines end in CR LF,
LF or CR; a blank line ends an event).
"""

import re

_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_END = 4


class EventTooLarge(Exception):
    """An event that exceeds the splitter's limit."""


class Splitter:
    """Collects network reads and hands out whole events, terminators included.

    What it hands out, concatenated, is what it was fed, less an unfinished tail.
    """

    def __init__(self, max_event: int) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._max_event = max_event
        self._after_cr = False

    @property
    def empty(self) -> bool:
        """There is no unfinished event."""
        return not self._buffer

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that ``chunk`` completes. Raises :class:`EventTooLarge`."""
        if not self._buffer and not self._after_cr and _is_plain(chunk):
            return [event + b"\n\n" for event in chunk[:-2].split(b"\n\n")]
        events = []
        if self._after_cr and chunk.startswith(b"\n"):
            # The rest of a line end that was split, and with it of the event before.
            events.append(b"\n")
            chunk = chunk[1:]
        self._buffer += chunk
        start = 0
        for end in _EVENT_END.finditer(self._buffer, max(0, self._scanned - _LONGEST_END)):
            events.append(bytes(self._buffer[start : end.end()]))
            start = end.end()
        if chunk:
            self._after_cr = start == len(self._buffer) and self._buffer.endswith(b"\r")
        del self._buffer[:start]
        self._scanned = len(self._buffer)
        if self._scanned > self._max_event:
            raise EventTooLarge(f"an event of more than {self._max_event} bytes")
        return events


def _is_plain(chunk: bytes) -> bool:
    """Whole events with line feeds alone, as nearly every chunk is."""
    return chunk.endswith(b"\n\n") and b"\r" not in chunk and b"\n\n\n" not in chunk


def data_of(event: bytes) -> bytes:
    """The event's data: its ``data:`` lines, joined by line feeds."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 == event.find(b"\n\n"):
        return event[6:-2]
    lines = [line[5:] for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def name_of(event: bytes) -> bytes:
    """The event's name, its ``event:`` line; empty when it has none."""
    for line in _LINE_END.split(event):
        if line.startswith(b"event:"):
            return line[6:].removeprefix(b" ")
    return b""


def event_of(data: bytes) -> bytes:
    """An event with one line of data."""
    return b"data: " + data + b"\n\n"
