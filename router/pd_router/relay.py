"""Decode's answer on its way to the client: taken note of, and rid of its handle."""

from collections.abc import Callable, Sequence
from typing import Any

from pd_connector.contract import KV_TRANSFER_PARAMS
from pd_router import jsonbytes, sse
from pd_router.answer import Answer
from pd_router.errors import clean_error_event
from pd_router.tokens import IdsTap

_DONE = b"[DONE]"
_HANDLE_MARK = f'"{KV_TRANSFER_PARAMS}"'.encode()
_ERROR_MARK = b'"error"'
_USAGE_MARK = b'"usage":{'
_PENDING_BYTES = 16 << 10
"""Events that are looked at together; one by one they would cost more."""

OnComplete = Callable[[Answer], None]


class StreamRelay:
    """Passes a stream of server-sent events on, byte for byte but for handles.

    ``on_complete`` is called once with the answer, before its last event is handed out, so
    that the next turn finds what this one left; None spares the parsing. ``secrets`` are words
    that no error event may tell. ``last`` is what the stream's last event contains. ``tap``
    takes token ids out. With ``take_usage`` the counts at the end are noted, and with
    ``hide_usage`` not passed on, because only the router asked for them.
    """

    def __init__(
        self,
        max_event: int,
        secrets: Sequence[str],
        on_complete: OnComplete | None,
        last: bytes = _DONE,
        *,
        tap: IdsTap | None = None,
        take_usage: bool = False,
        hide_usage: bool = False,
    ) -> None:
        self._splitter = sse.Splitter(max_event)
        self._secrets = secrets
        self._on_complete = on_complete
        self._last = last
        self._tap = tap
        self._take_usage = take_usage
        self._hide_usage = hide_usage
        self.usage: dict[str, Any] = {}
        self._answer = Answer()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self.done = False
        """The engine ended the stream itself."""

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets for ``chunk``. Raises :class:`~pd_router.sse.EventTooLarge`."""
        if (
            self._splitter.empty
            and chunk.endswith(b"\n\n")
            and _HANDLE_MARK not in chunk
            and _ERROR_MARK not in chunk
            and self._last not in chunk
            and b"\r" not in chunk
            and self._tap is None
            and not (self._take_usage and _USAGE_MARK in chunk)
        ):
            # Whole events in which nothing is to be changed.
            if self._on_complete is not None:
                self._note_later(chunk)
            return chunk
        self._note_pending()
        return b"".join(self._pass(event) for event in self._splitter.feed(chunk))

    def _pass(self, event: bytes) -> bytes:
        if self._tap is not None:
            event = self._tap.take(event)
        marked = _HANDLE_MARK in event or _ERROR_MARK in event
        if self._last in event and (self._last != _DONE or sse.data_of(event) == _DONE):
            self.done = True
            self._complete()
        counts = self._take_usage and _USAGE_MARK in event
        if self._on_complete is None and not marked and not counts:
            return event
        data = sse.data_of(event)
        if not data or data == _DONE:
            return event
        try:
            body = jsonbytes.load(data)
        except ValueError:
            self._answer.unreadable = True
            return sse.event_of(b"") if _HANDLE_MARK in event else event
        self._note(body)
        if counts and self._is_usage(body) and self._hide_usage:
            return b""
        if _HANDLE_MARK in event:
            event = event_without_handle(event, data, body)
        if isinstance(body, dict) and "error" in body:
            clean = clean_error_event(data, self._secrets)
            return event if clean is None else sse.event_of(clean)
        return event

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
        if events.startswith(b"data: "):
            # As vLLM sends them: JSON has no line ends of its own.
            chunks = b"[" + events[6:-2].replace(b"\n\ndata: ", b",") + b"]"
            if self._answer.add_middle(chunks):
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

    def _is_usage(self, body: Any) -> bool:
        """Whether it is the event that has the counts and nothing else; they are noted."""
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


def event_without_handle(event: bytes, data: bytes, body: Any) -> bytes:
    """The event less its handle, ``data`` and ``body`` being what it says."""
    bare = _without_handle(body)
    cut = jsonbytes.without_member(data, KV_TRANSFER_PARAMS)
    try:
        exact = data in event and jsonbytes.load(cut) == bare
    except ValueError:
        exact = False
    if exact:
        return event.replace(data, cut, 1)
    return sse.event_of(jsonbytes.dump(bare))


def _without_handle(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_handle(v) for k, v in value.items() if k != KV_TRANSFER_PARAMS}
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
    if _HANDLE_MARK not in raw:
        return raw
    bare = _without_handle(body)
    cut = jsonbytes.without_member(raw, KV_TRANSFER_PARAMS)
    try:
        return cut if jsonbytes.load(cut) == bare else jsonbytes.dump(bare)
    except ValueError:
        return jsonbytes.dump(bare)
