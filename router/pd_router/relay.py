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

OnComplete = Callable[[Answer], None]


class StreamRelay:
    """Passes a stream of server-sent events on, byte for byte but for handles.

    ``on_complete`` is called once with the answer, before its last event is handed out, so
    that the next turn finds what this one left; None spares the parsing.
    ``secrets`` are words that no error event may tell.
    """

    def __init__(
        self,
        max_event: int,
        secrets: Sequence[str],
        on_complete: OnComplete | None,
        *,
        tap: IdsTap | None = None,
        take_usage: bool = False,
        hide_usage: bool = False,
    ) -> None:
        """``tap`` takes token ids out. ``take_usage``: the counts at the end are noted, and with
        ``hide_usage`` not passed on, because only the router asked for them."""
        self._splitter = sse.Splitter(max_event)
        self._tap = tap
        self._take_usage = take_usage
        self._hide_usage = hide_usage
        self.usage: dict[str, Any] = {}
        self._secrets = secrets
        self._on_complete = on_complete
        self._answer = Answer()
        self.done = False
        """The engine ended the stream itself."""

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets for ``chunk``. Raises :class:`~pd_router.sse.EventTooLarge`."""
        return b"".join(self._pass(event) for event in self._splitter.feed(chunk))

    def _pass(self, event: bytes) -> bytes:
        if self._tap is not None:
            event = self._tap.take(event)
        marked = _HANDLE_MARK in event or _ERROR_MARK in event
        counts = self._take_usage and _USAGE_MARK in event
        if self._on_complete is None and not marked and not counts and _DONE not in event:
            return event
        data = sse.data_of(event)
        if data == _DONE:
            self.done = True
            self._complete()
            return event
        if not data:
            return event
        try:
            body = jsonbytes.load(data)
        except ValueError:
            self._answer.unreadable = True
            return sse.event_of(b"") if _HANDLE_MARK in event else event
        self._note(body)
        if counts and self._note_usage(body) and self._hide_usage:
            return b""
        if not marked or not isinstance(body, dict):
            return event
        if KV_TRANSFER_PARAMS in body:
            del body[KV_TRANSFER_PARAMS]
            event = sse.event_of(jsonbytes.dump(body))
        if "error" in body:
            clean = clean_error_event(data, self._secrets)
            return event if clean is None else sse.event_of(clean)
        return event

    def _note_usage(self, body: Any) -> bool:
        """Whether it is the event that has the counts and nothing else."""
        if not isinstance(body, dict) or not isinstance(body.get("usage"), dict):
            return False
        self.usage = body["usage"]
        return body.get("choices") == []

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
    usage = usage if isinstance(usage, dict) else {}
    if on_complete is not None:
        answer = Answer()
        answer.add(body)
        on_complete(answer)
    if isinstance(body, dict) and KV_TRANSFER_PARAMS in body:
        del body[KV_TRANSFER_PARAMS]
        return jsonbytes.dump(body), usage
    return raw, usage
