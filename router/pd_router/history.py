"""The history guard: does a prompt continue the turn whose KV a handle names?

The engine reads the blocks that it is told to read and never compares tokens, so a handle
goes out only with a prompt that starts with that turn. Equal messages make equal tokens
only where the chat template adds nothing and drops nothing; where a request gives reason
to doubt that, the tokens themselves must be proven, which the engine can do and the
router cannot.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pd_router import jsonbytes
from pd_router.answer import Answer

Endpoint = Literal["chat", "completions"]


class Continuation(Enum):
    """How a prompt relates to an earlier turn."""

    CHANGED = "changed"
    BY_MESSAGES = "by_messages"
    """It continues the turn, and its messages prove that the tokens do."""
    BY_TOKENS = "by_tokens"
    """It continues the turn as far as messages tell; only token ids prove it."""


@dataclass(frozen=True, slots=True)
class Past:
    """A finished turn, as much of it as the guard needs."""

    kind: str
    length: int
    """Messages, characters or token ids of prompt and answer, by ``kind``."""
    digest: bytes
    context: bytes
    needs_tokens: bool


# Fields that cannot change the prompt's tokens. Every other field must be as it was.
_NOT_PROMPT_NAMES = """
    messages prompt stream stream_options stream_interval
    temperature top_p top_k min_p seed n best_of max_tokens max_completion_tokens min_tokens
    stop stop_token_ids include_stop_str_in_output ignore_eos
    frequency_penalty presence_penalty repetition_penalty length_penalty repetition_detection
    logit_bias allowed_token_ids bad_words thinking_token_budget
    logprobs top_logprobs logprob_token_ids
    skip_special_tokens spaces_between_special_tokens
    return_token_ids return_tokens_as_token_ids return_prompt_text structured_outputs
    user metadata priority request_id session_id store service_tier safety_identifier
    prompt_cache_key prompt_cache_retention
"""
_NOT_PROMPT = frozenset(_NOT_PROMPT_NAMES.split())

# Chat fields that steer the template: with them a turn is known to be rendered differently
# once it is history (tools before the last user message, an empty think block after the
# generation prompt).
_STEERS_TEMPLATE = (
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
)

_REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
_REASONING_MARKS = ("think>", "[/think]")


class ChatPrompt:
    """The messages of a request, in canonical form."""

    kind = "chat"

    def __init__(self, fields: dict[str, Any]) -> None:
        messages = fields["messages"]
        self._canonical = [_canonical(message) for message in messages]
        self._doubtful = [
            _shows_reasoning(message) or not _is_text(message) for message in messages
        ]
        self._steered = any(fields.get(name) is not None for name in _STEERS_TEMPLATE) or (
            fields.get("include_reasoning") is False
        )
        self._context = _context(fields)

    def continuation(self, past: Past) -> Continuation:
        if past.kind != self.kind or past.context != self._context:
            return Continuation.CHANGED
        if len(self._canonical) <= past.length:
            return Continuation.CHANGED
        if _digest(self._canonical[: past.length]) != past.digest:
            return Continuation.CHANGED
        if past.needs_tokens or self._steered or any(self._doubtful[: past.length]):
            return Continuation.BY_TOKENS
        return Continuation.BY_MESSAGES

    def finished(self, answer: Answer) -> Past:
        message = answer.message()
        text = answer.text
        return Past(
            kind=self.kind,
            length=len(self._canonical) + 1,
            digest=_digest([*self._canonical, _canonical(message)]),
            context=self._context,
            needs_tokens=(
                self._steered
                or any(self._doubtful)
                or answer.reasoning
                or bool(answer.tool_calls)
                or _shows_reasoning(message)
                or _text_hides_tokens(answer)
                # Templates trim what they render as history.
                or text != text.strip()
            ),
        )


class TextPrompt:
    """A completion's prompt as text."""

    kind = "text"

    def __init__(self, fields: dict[str, Any], prompt: str) -> None:
        self._prompt = prompt
        self._context = _context(fields)

    def continuation(self, past: Past) -> Continuation:
        if past.kind != self.kind or past.context != self._context:
            return Continuation.CHANGED
        if len(self._prompt) <= past.length:
            return Continuation.CHANGED
        if _digest_text(self._prompt[: past.length]) != past.digest:
            return Continuation.CHANGED
        return Continuation.BY_TOKENS if past.needs_tokens else Continuation.BY_MESSAGES

    def finished(self, answer: Answer) -> Past:
        text = self._prompt + answer.text
        return Past(
            kind=self.kind,
            length=len(text),
            digest=_digest_text(text),
            context=self._context,
            needs_tokens=_text_hides_tokens(answer),
        )


class TokenPrompt:
    """A completion's prompt as token ids. The answer's ids are not known here."""

    kind = "ids"

    def __init__(self, fields: dict[str, Any], ids: list[int]) -> None:
        self._ids = ids
        self._context = _context(fields)

    def continuation(self, past: Past) -> Continuation:
        if past.kind != self.kind or past.context != self._context:
            return Continuation.CHANGED
        if len(self._ids) <= past.length or _digest_ids(self._ids[: past.length]) != past.digest:
            return Continuation.CHANGED
        return Continuation.BY_TOKENS

    def finished(self, answer: Answer) -> Past:
        return Past(self.kind, len(self._ids), _digest_ids(self._ids), self._context, True)


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def read_prompt(endpoint: Endpoint, fields: dict[str, Any]) -> Prompt | None:
    """The request's prompt; None when no later prompt can be shown to continue it."""
    if endpoint == "chat":
        messages = fields["messages"]
        opened = fields.get("continue_final_message") or (
            fields.get("add_generation_prompt") not in (None, True)
        )
        if opened or not all(_is_message(message) for message in messages):
            return None
        return ChatPrompt(fields)
    prompt = fields["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(fields, prompt)
    if is_token_ids(prompt):
        return TokenPrompt(fields, prompt)
    return None


def is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def _is_message(message: Any) -> bool:
    """Shaped as a message; anything else is left for the engine to refuse."""
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) for part in content)
    return content is None or isinstance(content, str)


def _is_text(message: dict[str, Any]) -> bool:
    """False for images and the like: what an URL names may have changed."""
    content = message.get("content")
    return not isinstance(content, list) or all(part.get("type") == "text" for part in content)


def _canonical(message: dict[str, Any]) -> bytes:
    """One message as bytes; equal for messages that differ in absent values alone.

    Reasoning of an assistant message is left out: clients send it back or not, and with it
    only the tokens count (:attr:`Past.needs_tokens`).
    """
    kept = {name: value for name, value in message.items() if value is not None and value != []}
    if kept.get("content") == "":
        del kept["content"]
    if kept.get("role") == "assistant":
        kept = {name: value for name, value in kept.items() if name not in _REASONING_FIELDS}
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_canonical_call(call) for call in kept["tool_calls"]]
    return jsonbytes.dump(sorted(kept.items()))


def _canonical_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    kept = {name: value for name, value in call.items() if value is not None}
    kept.setdefault("type", "function")
    if isinstance(kept.get("function"), dict):
        function = {name: value for name, value in kept["function"].items() if value is not None}
        kept["function"] = sorted(function.items())
    return sorted(kept.items())


def _context(fields: dict[str, Any]) -> bytes:
    """Digest of everything beside the messages that can shape the prompt.

    The order within a value stays: templates print tools in the order they came.
    """
    shaping = sorted(
        (name, value)
        for name, value in fields.items()
        if name not in _NOT_PROMPT and value is not None
    )
    return hashlib.sha256(jsonbytes.dump(shaping)).digest()


def _shows_reasoning(message: dict[str, Any]) -> bool:
    if message.get("role") != "assistant":
        return False
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text")) for part in content)
    text = (content or "").lower()
    return any(message.get(name) is not None for name in _REASONING_FIELDS) or any(
        mark in text for mark in _REASONING_MARKS
    )


def _text_hides_tokens(answer: Answer) -> bool:
    """The text lacks what was generated: a stop string cut off, a character cut in two."""
    return isinstance(answer.stop_reason, str) or "\ufffd" in answer.text


def _digest(messages: list[bytes]) -> bytes:
    digest = hashlib.sha256()
    for message in messages:
        digest.update(len(message).to_bytes(8, "big"))
        digest.update(message)
    return digest.digest()


def _digest_text(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _digest_ids(ids: list[int]) -> bytes:
    return hashlib.sha256(jsonbytes.dump(ids)).digest()
