"""Decode's answer on its way to the client: taken note of, and rid of its handle."""

from collections.abc import Callable, Sequence
from typing import Any

from pd_connector.contract import KV_TRANSFER_PARAMS
from pd_router import jsonbytes, sse
from pd_router.answer import Answer
from pd_router.errors import ErrorForm, clean_error_event
from pd_router.tokens import IdsTap

_DONE = b"[DONE]"
HANDLE_FIELDS = (KV_TRANSFER_PARAMS, "ec_transfer_params")
"""Fields of an answer that are between engines."""
_HANDLE_MARKS = tuple(f'"{name}"'.encode() for name in HANDLE_FIELDS)
_HANDLE_MARK = b'_transfer_params"'
_ERROR_MARK = b'"error"'
_USAGE_MARK = b'"usage":{'
_FAILED_MARK = b"response.failed"
_FAILED = ("error", "response.failed")
"""Types of events that tell of an error without saying so at their top."""
_PENDING_BYTES = 16 << 10
"""Events that are looked at together; one by one they would cost more."""

OnComplete = Callable[[Answer], None]


class StreamRelay:
    """Passes a stream of server-sent events on, byte for byte but for handles.

    ``on_complete`` is called once with the answer, before its last event is handed out, so
    that the next turn finds what this one left; None spares the parsing.
    ``secrets`` are words that no error event may tell, ``form`` is the shape of such events.
    The stream's last event contains one of ``last``.
    """

    def __init__(
        self,
        max_event: int,
        secrets: Sequence[str],
        on_complete: OnComplete | None,
        form: ErrorForm = "openai",
        last: tuple[bytes, ...] = (_DONE,),
        *,
        tap: IdsTap | None = None,
        take_usage: bool = False,
        hide_usage: bool = False,
    ) -> None:
        """``tap`` takes token ids out. ``take_usage``: the counts at the end are noted, and with
        ``hide_usage`` not passed on, because only the router asked for them."""
        self._splitter = sse.Splitter(max_event)
        self._secrets = secrets
        self._on_complete = on_complete
        self._form = form
        self._last = last
        counts = (_USAGE_MARK,) if take_usage else ()
        self._special = (b"_transfer_params", _ERROR_MARK, _FAILED_MARK, b"\r", *last, *counts)
        self._tap = tap
        self._take_usage = take_usage
        self._hide_usage = hide_usage
        self.usage: dict[str, Any] = {}
        self._answer = Answer()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self.on_first: Callable[[bytes], None] | None = None
        """Called with the stream's first bytes."""
        self.done = False
        """The engine ended the stream itself."""

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets for ``chunk``. Raises :class:`~pd_router.sse.EventTooLarge`."""
        if self.on_first is not None:
            self.on_first(chunk)
            self.on_first = None
        plain = self._tap is None and self._splitter.empty and chunk.endswith(b"\n\n")
        if plain and not self._is_special(chunk):
            # Whole events in which nothing is to be changed.
            if self._on_complete is not None:
                self._note_later(chunk)
            return chunk
        self._note_pending()
        return b"".join(self._pass(event) for event in self._splitter.feed(chunk))

    @property
    def marks(self) -> tuple[bytes, ...] | None:
        """Whole events without any of these need not be fed; None: all have to be, for now."""
        plain = self._tap is None and self._splitter.empty and self.on_first is None
        return self._special if plain else None

    @property
    def notes(self) -> bool:
        """What is passed on unfed is to be told to :meth:`note_passed`."""
        return self._on_complete is not None

    def note_passed(self, events: bytes) -> None:
        """Whole events that the client has got without being fed."""
        if events and self._on_complete is not None:
            self._note_later(events)

    def _pass(self, event: bytes) -> bytes:
        if self._tap is not None:
            event = self._tap.take(event)
        handled = has_handle(event)
        counts = self._take_usage and _USAGE_MARK in event
        marked = handled or counts or _ERROR_MARK in event or _FAILED_MARK in event
        if self._is_last(event):
            self.done = True
            self._complete()
        if self._on_complete is None and not marked:
            return event
        data = sse.data_of(event)
        if not data or data == _DONE:
            return event
        try:
            body = jsonbytes.load(data)
        except ValueError:
            self._answer.unreadable = True
            return sse.event_of(b"") if handled else event
        self._note(body)
        if counts and self._note_usage(body) and self._hide_usage:
            return b""
        if handled:
            event = event_without_handle(event, data, body)
        if isinstance(body, dict) and ("error" in body or body.get("type") in _FAILED):
            return clean_error_event(sse.data_of(event), self._secrets, self._form) or event
        return event

    def _is_special(self, chunk: bytes) -> bool:
        for mark in self._special:  # noqa: SIM110 - a generator is slower
            if mark in chunk:
                return True
        return False

    def _is_last(self, event: bytes) -> bool:
        if self._form == "openai":
            return _DONE in event and sse.data_of(event) == _DONE
        if not any(last in event for last in self._last):
            return False
        name = sse.name_of(event)
        return any(last == name for last in self._last)

    def _note_later(self, events: bytes) -> None:
        self._pending.append(events)
        self._pending_bytes += len(events)
        if self._pending_bytes >= _PENDING_BYTES:
            self._note_pending()

    def _note_pending(self) -> None:
        if not self._pending:
            return
        events = b"".join(self._pending)
        self._pending, self._pending_bytes = [], 0
        if self._answer.add_events(events):
            return
        for data in map(sse.data_of, sse.Splitter(len(events)).feed(events)):
            if data:
                self._note(_body(data))

    def _note(self, body: Any) -> None:
        if self._on_complete is None:
            return
        self._answer.add(body)
        if self._answer.handle is not None and self._answer.complete:
            self._complete()

    def _complete(self) -> None:
        if self._on_complete is not None:
            self._on_complete(self._answer)
            self._on_complete = None

    def _note_usage(self, body: Any) -> bool:
        """Whether it is the event that has the counts and nothing else."""
        if not isinstance(body, dict) or not isinstance(body.get("usage"), dict):
            return False
        self.usage = body["usage"]
        return body.get("choices") == []


def _body(data: bytes) -> Any:
    """The JSON of an event; None if it is not JSON."""
    try:
        return jsonbytes.load(data)
    except ValueError:
        return None


def has_handle(raw: bytes) -> bool:
    return _HANDLE_MARK in raw and any(mark in raw for mark in _HANDLE_MARKS)


def _cut(raw: bytes) -> bytes:
    for name in HANDLE_FIELDS:
        raw = jsonbytes.without_member(raw, name)
    return raw


def event_without_handle(event: bytes, data: bytes, body: Any) -> bytes:
    """The event less its handle, ``data`` and ``body`` being what it says."""
    exact = _cut_exactly(data, body) if data in event else None
    if exact is not None:
        return event.replace(data, exact, 1)
    return sse.event_of(jsonbytes.dump(_without_handle(body)))


def _cut_exactly(raw: bytes, body: Any) -> bytes | None:
    """``raw`` less its handles, if that is what ``body`` says less its own."""
    cut = _cut(raw)
    try:
        said = jsonbytes.load(cut)
    except ValueError:
        return None
    if isinstance(body, dict):
        # As the engine has it; where there are more within, these are not equal.
        bare = {name: value for name, value in body.items() if name not in HANDLE_FIELDS}
        if said == bare:
            return cut
    return cut if said == _without_handle(body) else None


def _without_handle(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_handle(v) for k, v in value.items() if k not in HANDLE_FIELDS}
    if isinstance(value, list):
        return [_without_handle(item) for item in value]
    return value


def relay_body(
    raw: bytes, on_complete: OnComplete | None, tap: IdsTap | None = None
) -> tuple[bytes, dict[str, Any]]:
    """The client's bytes of a whole answer, and its usage.

    Raises :class:`ValueError` if it is not JSON.
    """
    if tap is not None:
        raw = tap.take(raw)
    body = jsonbytes.load(raw)
    usage = body.get("usage") if isinstance(body, dict) else None
    if on_complete is not None:
        answer = Answer()
        answer.add(body)
        on_complete(answer)
    return body_without_handle(raw, body), usage if isinstance(usage, dict) else {}


def body_without_handle(raw: bytes, body: Any) -> bytes:
    """The bytes of a whole answer less its handle; ``body`` is what they say."""
    if not has_handle(raw):
        return raw
    exact = _cut_exactly(raw, body)
    return jsonbytes.dump(_without_handle(body)) if exact is None else exact
