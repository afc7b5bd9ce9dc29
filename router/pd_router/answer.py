"""The answer of a turn, put together from stream chunks or taken from one body."""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pd_connector.contract import KV_TRANSFER_PARAMS
from pd_router.alike import Alike, like_the_last

COMPLETE = frozenset({"stop", "length", "tool_calls"})
"""Finish reasons of an answer that ended by itself."""

_REASONING = ("reasoning", "reasoning_content")


class _Delta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    index: Literal[0] = 0
    delta: _Delta | None = None
    message: None = None
    text: str | None = None
    finish_reason: None = None
    stop_reason: None = None


class _Chunk(msgspec.Struct, gc=False):
    """A chunk in the midst of an answer; nearly all are like this, and quickly read."""

    choices: list[_Choice] = []
    error: None = None
    kv_transfer_params: None = None


_middle_chunks = msgspec.json.Decoder(list[_Chunk]).decode


@dataclass(slots=True)
class Answer:
    """One choice's answer, chat message or completion text."""

    role: str = "assistant"
    content: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    reasoning: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    handle: dict[str, Any] | None = None
    _alike: Alike | None = None
    unreadable: bool = False
    """It has an error, a second choice or a part that is not understood here."""

    @property
    def text(self) -> str:
        return "".join(self.content)

    @property
    def complete(self) -> bool:
        return not self.unreadable and self.finish_reason in COMPLETE

    def message(self) -> dict[str, Any]:
        """The assistant message as a client sends it back."""
        calls = [self.tool_calls[index] for index in sorted(self.tool_calls)]
        return {"role": self.role, "content": self.text, "tool_calls": calls}

    def add_events(self, events: bytes) -> bool:
        """Take in whole events if all are plain text in the midst of an answer.

        Else nothing is taken in, and False is returned.
        """
        alike = self._alike or self._find_alike(events)
        start = -1 if alike is None else alike.start_in(events)
        text = None if alike is None or start < 0 else alike.text_of(events[start:])
        if text is None:
            self._alike = None
            return self._add_chunks(events)
        if start and not self._add_chunks(events[:start]):
            return False
        self.content.append(text)
        self._alike = alike
        return True

    def _find_alike(self, events: bytes) -> Alike | None:
        alike = like_the_last(events)
        if alike is None:
            return None
        try:
            plain = _middle_chunks(b"[" + alike.json_with(b"x") + b"]")
        except (msgspec.DecodeError, RecursionError):
            return None
        choices = [choice for chunk in plain for choice in chunk.choices]
        if len(plain) != 1 or len(choices) != 1:
            return None
        text, delta = choices[0].text, choices[0].delta
        own = (text, delta) in (("x", None), (None, _Delta(content="x")))
        return alike if own else None

    def _add_chunks(self, events: bytes) -> bool:
        if not events.startswith(b"data: "):
            return False
        try:
            # As vLLM sends them: JSON has no line ends of its own.
            plain = _middle_chunks(b"[" + events[6:-2].replace(b"\n\ndata: ", b",") + b"]")
        except (msgspec.DecodeError, RecursionError):
            return False
        for chunk in plain:
            for choice in chunk.choices:
                if choice.text:
                    self.content.append(choice.text)
                if (delta := choice.delta) is None:
                    continue
                if delta.content:
                    self.content.append(delta.content)
                if delta.role:
                    self.role = delta.role
                if delta.reasoning is not None or delta.reasoning_content is not None:
                    self.reasoning = True
        return True

    def add(self, body: Any) -> None:
        """Take in a stream chunk or a whole answer; never raises."""
        try:
            self._add(body)
        except (AttributeError, TypeError, ValueError):
            self.unreadable = True

    def _add(self, body: Any) -> None:
        if not isinstance(body, dict) or "error" in body:
            self.unreadable = True
            return
        handle = body.get(KV_TRANSFER_PARAMS)
        if isinstance(handle, dict):
            self.handle = handle
        choices = body.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            self._add_choice(choice)

    def _add_choice(self, choice: Any) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            self.unreadable = True
            return
        if "text" in choice:
            self._add_text(choice["text"])
        for name in ("delta", "message"):
            if isinstance(choice.get(name), dict):
                self._add_message(choice[name])
        reason = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise TypeError("finish_reason is no text")
        self.finish_reason = reason or self.finish_reason
        if choice.get("stop_reason") is not None:
            self.stop_reason = choice["stop_reason"]

    def _add_message(self, part: dict[str, Any]) -> None:
        for name, value in part.items():
            if name == "content":
                self._add_text(value)
            elif name == "role":
                self.role = value or self.role
            elif name == "tool_calls":
                for place, call in enumerate(value or []):
                    self._add_tool_call(place, call)
            elif name in _REASONING:
                self.reasoning |= value is not None
            elif value:
                self.unreadable = True

    def _add_text(self, text: Any) -> None:
        if isinstance(text, str):
            self.content.append(text)
        elif text is not None:
            self.unreadable = True

    def _add_tool_call(self, place: int, part: Any) -> None:
        function = part.get("function") if isinstance(part, dict) else None
        if not isinstance(function, dict):
            self.unreadable = True
            return
        index = part["index"] if isinstance(part.get("index"), int) else place
        call = self.tool_calls.setdefault(
            index, {"type": "function", "function": {"arguments": ""}}
        )
        for name in ("id", "type"):
            if part.get(name):
                call[name] = part[name]
        if function.get("name"):
            call["function"]["name"] = function["name"]
        call["function"]["arguments"] += function.get("arguments") or ""
