"""The history guard: does a prompt continue the turn whose KV a handle names?

The engine reads the blocks that it is told to read; vLLM never compares tokens, so a handle
goes out only with a prompt that starts with that turn. Equal messages make equal tokens
only where the chat template adds nothing and drops nothing; where a request gives reason
to doubt that, the tokens themselves must be proven.
"""

import hashlib
import sys
from array import array
from enum import Enum
from typing import Any, Literal

import msgspec

from pd_router import jsonbytes
from pd_router.answer import Answer

Endpoint = Literal["chat", "completions"]

MARK = 4
"""Bytes of a mark: enough to estimate what is shared; nothing is proven by it."""
MOST_MARKS = 64
MOST_KEYS = 16
"""Earlier turns that a prompt without a conversation id is looked up by."""

_CHARS_PER_STEP = 1024
_IDS_PER_STEP = 128


class Continuation(Enum):
    """How a prompt relates to an earlier turn."""

    CHANGED = "changed"
    BY_MESSAGES = "by_messages"
    """It continues the turn, and its messages prove that the tokens do."""
    BY_TOKENS = "by_tokens"
    """It continues the turn as far as messages tell; only token ids prove it."""


class Match(msgspec.Struct, frozen=True, gc=False):
    """A prompt beside an earlier turn."""

    continuation: Continuation
    shared: float
    """Estimated share, 0 to 1, of the turn that the prompt starts with."""


NO_MATCH = Match(Continuation.CHANGED, 0.0)


class Past(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished turn, as much of it as the guard needs; digests alone."""

    kind: str
    length: int
    """Messages, characters or token ids of prompt and answer, by ``kind``."""
    size: int
    """Characters or ids of it."""
    digest: bytes
    anchor: bytes
    """What a later prompt without a conversation id finds the turn by; empty: not at all."""
    context: bytes
    needs_tokens: bool
    step: int
    marks: bytes
    """Of the first ``step``, ``2 * step``, ... messages, characters or ids."""


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
_STEERS_TEMPLATE = frozenset(
    (
        "tools",
        "functions",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
    )
)

_REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
_REASONING_MARKS = ("think>", "THINK>", "[/think]", "[/THINK]")


class ChatPrompt:
    """The messages of a request, in canonical form."""

    kind = "chat"

    def __init__(self, fields: dict[str, Any]) -> None:
        self._canonical: list[bytes] = []
        self._answers: list[bool] = []
        self._doubtful: list[bool] = []
        self.only_text = True
        for message in fields["messages"]:
            self._canonical.append(_canonical(message))
            self._answers.append(message.get("role") == "assistant")
            text = _is_text(message)
            self._doubtful.append(not text or _shows_reasoning(message))
            self.only_text &= text
        self._steered = fields.get("include_reasoning") is False or not (
            _STEERS_TEMPLATE.isdisjoint(name for name in fields if fields[name] is not None)
        )
        self._context = _context(fields)
        self._state = hashlib.blake2b(self._context, digest_size=16)
        self._chain = _chain(self._state, self._canonical)
        self.size: int = sum(map(len, self._canonical))

    @property
    def turn(self) -> int:
        """The turn's number in its conversation, from 1."""
        return sum(self._answers) + 1

    def anchors(self) -> list[bytes]:
        """Anchors of the turns that this prompt may continue, the latest first."""
        ends = [index + 1 for index, answer in enumerate(self._answers) if answer]
        return [self._chain[end] for end in reversed(ends) if end < len(self._chain)][:MOST_KEYS]

    def match(self, past: Past) -> Match:
        if past.kind != self.kind or past.context != self._context:
            return NO_MATCH
        length = past.length
        if len(self._canonical) <= length or self._chain[length] != past.digest:
            same = _marks_shared(past, [*map(self._mark, range(1, len(self._chain)))])
            size = sum(map(len, self._canonical[: same * past.step]))
            return Match(Continuation.CHANGED, min(1.0, size / max(past.size, 1)))
        if past.needs_tokens or self._steered or any(self._doubtful[:length]):
            return Match(Continuation.BY_TOKENS, 1.0)
        return Match(Continuation.BY_MESSAGES, 1.0)

    def finished(self, answer: Answer) -> Past:
        message = answer.message()
        text = answer.text
        last = _canonical(message)
        chain = [*self._chain, *_chain(self._state.copy(), [last])[1:]]
        step, marks = _thin(1, [digest[:MARK] for digest in chain[1:]])
        return Past(
            kind=self.kind,
            length=len(self._canonical) + 1,
            size=self.size + len(last),
            digest=chain[-1],
            anchor=chain[-1],
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
            step=step,
            marks=marks,
        )

    def _mark(self, length: int) -> bytes:
        return self._chain[length][:MARK]


class _Run:
    """A completion's prompt: one run of characters or token ids."""

    kind: str
    step: int
    only_text = True
    turn = 1

    def __init__(self, fields: dict[str, Any], data: Any) -> None:
        self._data = data
        self._context = _context(fields)
        self._chain = self._digests(data)
        self.size: int = len(data)

    def _bytes(self, part: Any) -> bytes:
        raise NotImplementedError

    def _digests(self, data: Any) -> list[bytes]:
        """After 0, ``step``, ``2 * step``, ... items."""
        starts = range(0, len(data) - self.step + 1, self.step)
        state = hashlib.blake2b(self._context, digest_size=16)
        return _chain(state, [self._bytes(data[at : at + self.step]) for at in starts])

    def _digest_at(self, data: Any, length: int) -> bytes:
        state = hashlib.blake2b(self._context, digest_size=16)
        state.update(self._bytes(data[:length]))
        return state.digest()

    def anchors(self) -> list[bytes]:
        """Anchors of the turns that this prompt may continue, the latest first."""
        return self._chain[:0:-1][:MOST_KEYS]

    def match(self, past: Past) -> Match:
        if past.kind != self.kind or past.context != self._context:
            return NO_MATCH
        length = past.length
        if len(self._data) <= length or self._digest_at(self._data, length) != past.digest:
            same = _marks_shared(past, [d[:MARK] for d in self._chain[1:]], self.step)
            return Match(Continuation.CHANGED, min(1.0, same * past.step / max(past.size, 1)))
        by_tokens = past.needs_tokens
        return Match(Continuation.BY_TOKENS if by_tokens else Continuation.BY_MESSAGES, 1.0)

    def _past(self, data: Any, needs_tokens: bool) -> Past:
        chain = self._digests(data)
        step, marks = _thin(self.step, [digest[:MARK] for digest in chain[1:]])
        return Past(
            kind=self.kind,
            length=len(data),
            size=len(data),
            digest=self._digest_at(data, len(data)),
            anchor=chain[-1] if len(chain) > 1 else b"",
            context=self._context,
            needs_tokens=needs_tokens,
            step=step,
            marks=marks,
        )


class TextPrompt(_Run):
    """A completion's prompt as text."""

    kind = "text"
    step = _CHARS_PER_STEP

    def _bytes(self, part: Any) -> bytes:
        return bytes(part.encode(errors="surrogatepass"))

    def finished(self, answer: Answer) -> Past:
        return self._past(self._data + answer.text, _text_hides_tokens(answer))


class TokenPrompt(_Run):
    """A completion's prompt as token ids. The answer's ids are not known here."""

    kind = "ids"
    step = _IDS_PER_STEP

    def _bytes(self, part: Any) -> bytes:
        return jsonbytes.dump(part)

    def finished(self, answer: Answer) -> Past:
        return self._past(self._data, True)


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def read_prompt(endpoint: Endpoint, fields: dict[str, Any]) -> Prompt | None:
    """The request's prompt; None when no later prompt can be shown to continue it."""
    if endpoint == "chat":
        messages = fields["messages"]
        opened = fields.get("continue_final_message") or (
            fields.get("add_generation_prompt") not in (None, True)
        )
        if opened or not all(map(_is_message, messages)):
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


def ids_digest(ids: "array[int]") -> bytes:
    """Digest of token ids, equal on every machine."""
    if sys.byteorder == "big":
        ids = array(ids.typecode, ids)
        ids.byteswap()
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


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
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and role is not None and content and type(content) is str:
        # As nearly every message is; what follows says the same of it.
        return jsonbytes.dump((("content", content), ("role", role)))
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
    return hashlib.blake2b(jsonbytes.dump(shaping), digest_size=16).digest()


def _shows_reasoning(message: dict[str, Any]) -> bool:
    if message.get("role") != "assistant":
        return False
    for name in _REASONING_FIELDS:
        if message.get(name) is not None:
            return True
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text")) for part in content)
    if not content or (">" not in content and "]" not in content):
        return False  # A look for one character costs next to nothing.
    return any(mark in content for mark in _REASONING_MARKS)


def _text_hides_tokens(answer: Answer) -> bool:
    """The text lacks what was generated: a stop string cut off, a character cut in two."""
    return isinstance(answer.stop_reason, str) or "\ufffd" in answer.text


def _chain(state: Any, parts: list[bytes]) -> list[bytes]:
    """Digests of what ``state`` has taken in and the first 0, 1, 2, ... parts more."""
    digests = [state.digest()]
    for part in parts:
        state.update(len(part).to_bytes(8, "big") + part)
        digests.append(state.digest())
    return digests


def _thin(step: int, marks: list[bytes]) -> tuple[int, bytes]:
    """At most :data:`MOST_MARKS` of the marks, and the step between those."""
    every = 1
    while len(marks) // every > MOST_MARKS:
        every *= 2
    return step * every, b"".join(marks[every - 1 :: every])


def _marks_shared(past: Past, marks: list[bytes], step: int = 1) -> int:
    """How many of a turn's marks a prompt has too; ``marks`` are one per ``step``."""
    every = past.step // step
    same = 0
    for index in range(len(past.marks) // MARK):
        at = (index + 1) * every - 1
        if at >= len(marks) or marks[at] != past.marks[index * MARK : (index + 1) * MARK]:
            break
        same += 1
    return same
