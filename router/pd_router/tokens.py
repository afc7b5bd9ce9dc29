"""Token ids, where the engines do not compare them: what a prompt's and an answer's are.

A stock engine tells them on request: ``/tokenize`` those of a prompt before it is sent,
``return_token_ids`` those of a prompt and an answer on their way.
"""

import re
from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from pd_router import jsonbytes
from pd_router.engines import Engines, LegFailure
from pd_router.history import Endpoint, ids_digest
from pd_router.legs import Leg

TOKENIZE_PATH = "/tokenize"
TOKENIZE_SECONDS = 5.0
MOST_CACHED_IDS = 4_000_000
"""Token ids of recent prompts, 4 bytes each, so that a repeated prompt is not asked again."""

# What vLLM's /tokenize takes; source: entrypoints/serve/tokenize/protocol.py. A prompt that
# another field shapes gets other ids here than on prefill, and is not reused.
_CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
_TEXT_FIELDS = ("model", "prompt", "add_special_tokens")

# In a JSON string every quote is escaped, so these bytes are a key with a list of numbers.
_IDS = re.compile(rb'(,?)"((?:prompt_)?token_ids)":\[([0-9, ]*)\]')
_EMPTY_DELTA = b'"delta":{}'
_UNFINISHED = b'"finish_reason":null'


class PromptIds:
    """Token ids of prompts, asked of an engine once each."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._cache: OrderedDict[bytes, array[int]] = OrderedDict()
        self._cached = 0

    async def digest(
        self, leg: Leg, endpoint: Endpoint, fields: dict[str, Any], count: int
    ) -> bytes | None:
        """Digest of a prompt's first ``count`` ids; None: it has fewer, or they are not known."""
        ids = await self._ids(leg, endpoint, fields)
        if ids is None or len(ids) < count:
            return None
        return ids_digest(ids[:count])

    async def _ids(
        self, leg: Leg, endpoint: Endpoint, fields: dict[str, Any]
    ) -> "array[int] | None":
        body = _question(endpoint, fields)
        if isinstance(body, array):
            return body
        name = blake2b(body, digest_size=16).digest()
        if (known := self._cache.get(name)) is not None:
            self._cache.move_to_end(name)
            return known
        try:
            status, raw = await self._engines.fetch(
                leg, TOKENIZE_PATH, body, {}, total=TOKENIZE_SECONDS
            )
            ids = array("I", jsonbytes.load(raw)["tokens"]) if status == 200 else None
        except (LegFailure, ValueError, TypeError, KeyError, OverflowError):
            ids = None
        if ids is not None:
            self._keep(name, ids)
        return ids

    def _keep(self, name: bytes, ids: "array[int]") -> None:
        self._cache[name] = ids
        self._cached += len(ids)
        while self._cached > MOST_CACHED_IDS:
            _, oldest = self._cache.popitem(last=False)
            self._cached -= len(oldest)


def _question(endpoint: Endpoint, fields: dict[str, Any]) -> "bytes | array[int]":
    if endpoint == "completions":
        prompt = fields["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return array("I", prompt)
        fields = {**fields, "prompt": prompt}
    names = _CHAT_FIELDS if endpoint == "chat" else _TEXT_FIELDS
    return jsonbytes.dump({n: fields[n] for n in names if fields.get(n) is not None})


def prompt_ids(answer: Any) -> "array[int] | None":
    """The prompt's ids in a whole answer that was asked for them."""
    try:
        ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        return array("I", ids)
    except (AttributeError, KeyError, IndexError, TypeError, OverflowError):
        return None


class IdsTap:
    """Takes the token ids out of an answer on its way, where only the router asked for them."""

    def __init__(self, keep: bool) -> None:
        """``keep``: the client asked for them too."""
        self._keep = keep
        self.prompt: array[int] | None = None
        self.answer: array[int] = array("I")

    def take(self, event: bytes) -> bytes:
        """What the client gets of a stream's event or of a whole answer."""
        if b"token_ids" not in event:
            return event
        taken = _IDS.sub(self._take, event)
        if self._keep:
            return event
        if _EMPTY_DELTA in taken and _UNFINISHED in taken:
            return b""  # Without the ids the engine would not have sent it.
        return taken

    def digest(self, count: int) -> bytes:
        """Digest of the first ``count`` ids of prompt and answer; empty: they are not known."""
        if self.prompt is None or len(self.prompt) + len(self.answer) < count:
            return b""
        return ids_digest((self.prompt + self.answer)[:count])

    def _take(self, match: "re.Match[bytes]") -> bytes:
        comma, name, text = match.groups()
        try:
            ids = array("I", map(int, text.split(b",")) if text.strip() else [])
        except (ValueError, OverflowError):
            ids = array("I")
        if name == b"token_ids":
            self.answer.extend(ids)
        else:
            self.prompt = ids
        return comma + b'"' + name + b'":null'
