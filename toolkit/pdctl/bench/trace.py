"""Conversations from a file in the input format of vLLM's multi-turn benchmark.

That is a JSON list of ``{"id": ..., "messages": [{"role", "content"}, ...]}``, user and assistant
in turn, or a description of conversations to generate. The user's messages are sent as they are;
the answers that come back take the place of the file's, so that the history is what the engine
generated.
"""

import json
from pathlib import Path
from typing import Any

from pdctl.bench.generate import FILETYPE, generated
from pdctl.bench.workload import Conversation, Load, Part, TurnPlan, Workload
from pdctl.errors import PdctlError

CHARACTERS_PER_TOKEN = 4
"""Rough size of the answer to ask for, from the file's answer."""
MOST_ANSWER_TOKENS = 1024
OPENING_TOKENS = 16
"""Of the line of its own that every conversation begins with."""


def trace(file: Path, answer_tokens: int | None, seed: str, load: Load) -> Workload:
    """The file's conversations, each beginning with a line that no cache has seen, or those that
    it describes.

    Args:
        answer_tokens: of every answer; None: about as long as the file's.

    Raises:
        PdctlError: the file is neither (exit code 2).
    """
    entries = _content(file)
    if isinstance(entries, dict) and entries.get("filetype") == FILETYPE:
        return generated(file, entries, answer_tokens, seed, load)
    if not isinstance(entries, list) or not entries:
        raise PdctlError(f"{file}: is not a list of conversations", 2)
    conversations = tuple(
        _conversation(file, entry, place, answer_tokens) for place, entry in enumerate(entries)
    )
    warmup = (Conversation("warm-up", conversations[0].turns[:2]),)
    return Workload(f"trace/{file.name}", conversations, warmup, load)


def _content(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PdctlError(f"{file}: {error.strerror}", 2) from None
    except ValueError as error:
        raise PdctlError(f"{file}: is not JSON ({error})", 2) from None


def _conversation(file: Path, entry: Any, place: int, answer_tokens: int | None) -> Conversation:
    where = f"{file}: conversation {place + 1}"
    if not isinstance(entry, dict) or not isinstance(entry.get("messages"), list):
        raise PdctlError(f"{where}: has no list 'messages'", 2)
    turns: list[TurnPlan] = []
    # A line of its own at the beginning: equal files meet no warm cache.
    parts: list[Part] = [Part("system", tokens=OPENING_TOKENS)]
    for number, message in enumerate(entry["messages"], 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise PdctlError(f"{where}: message {number} has no text as 'content'", 2)
        if message.get("role") != "assistant":
            parts.append(Part(str(message.get("role", "user")), text=message["content"]))
            continue
        if not parts:
            raise PdctlError(f"{where}: message {number}: two answers follow each other", 2)
        wanted = answer_tokens or len(message["content"]) // CHARACTERS_PER_TOKEN
        turns.append(TurnPlan(tuple(parts), max(1, min(wanted, MOST_ANSWER_TOKENS))))
        parts = []
    if not turns:
        raise PdctlError(f"{where}: has no assistant message", 2)
    return Conversation(str(entry.get("id", place)), tuple(turns))
