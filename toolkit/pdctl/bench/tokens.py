"""Prompts of exact token lengths, by the model's own tokenizer."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import httpx
import jinja2

from pdctl.bench.words import fresh_text
from pdctl.errors import PdctlError

Messages = list[dict[str, Any]]

_MOST_TRIES = 40


class Tokenizer(Protocol):
    exact: bool

    async def count_chat(self, messages: Messages) -> int:
        """Tokens of the prompt that the messages become."""

    async def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""


class EngineTokenizer:
    """An engine's ``/tokenize``."""

    exact = True

    def __init__(self, client: httpx.AsyncClient, url: str, model: str, key: str | None) -> None:
        self._client = client
        self._url = url
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def count_chat(self, messages: Messages) -> int:
        asked = {"messages": messages, "add_generation_prompt": True}
        return int((await self._ask(asked))["count"])

    async def ids(self, text: str) -> list[int]:
        asked = {"prompt": text, "add_special_tokens": False}
        return [int(token) for token in (await self._ask(asked))["tokens"]]

    async def works(self) -> bool:
        try:
            return bool(await self.ids("a"))
        except PdctlError:
            return False

    async def _ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._client.post(
                f"{self._url}/tokenize",
                json={"model": self._model, **fields},
                headers=self._headers,
            )
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
            answer["count"], answer["tokens"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise PdctlError(f"{self._url}/tokenize: {error or type(error).__name__}") from None
        return answer


class LocalTokenizer:
    """A model's folder: ``tokenizer.json`` and its chat template."""

    exact = True

    def __init__(self, folder: Path) -> None:
        try:
            import tokenizers  # noqa: PLC0415
        except ImportError:
            raise PdctlError("--tokenizer needs: pip install 'pdctl[bench]'", 2) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise PdctlError(f"{folder}/tokenizer.json: cannot be read ({error})", 2) from None
        self._settings: dict[str, Any] = {}
        if (config := folder / "tokenizer_config.json").is_file():
            self._settings = json.loads(config.read_text(encoding="utf-8"))
        template = self._settings.get("chat_template")
        if (file := folder / "chat_template.jinja").is_file():
            template = file.read_text(encoding="utf-8")
        self._template = _chat_template(template) if isinstance(template, str) else None

    async def count_chat(self, messages: Messages) -> int:
        if self._template is None:
            raise PdctlError("--tokenizer: the folder has no chat template", 2)
        tokens = {
            name: _token_text(self._settings.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        text = self._template.render(messages=messages, add_generation_prompt=True, **tokens)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    async def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _chat_template(text: str) -> jinja2.Template:
    def refuse(message: str) -> None:
        raise PdctlError(f"the chat template refuses the messages: {message}")

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, ensure_ascii=False, indent=how.get("indent")
    )
    environment.globals["raise_exception"] = refuse
    return environment.from_string(text)


class EstimatingTokenizer:
    """Where no tokenizer can be had: lengths by what the endpoint counted of three probes.

    The rows then hold the lengths that the endpoint counted, near the ones asked for.
    """

    exact = False

    def __init__(self, count: Callable[[Messages], Awaitable[int]]) -> None:
        self._count = count
        self._probed: tuple[float, float, float] | None = None

    async def count_chat(self, messages: Messages) -> int:
        if self._probed is None:
            self._probed = await self._probe()
        first, per_message, per_character = self._probed
        characters = sum(len(str(message.get("content") or "")) for message in messages)
        return round(first + per_message * (len(messages) - 1) + per_character * characters)

    async def _probe(self) -> tuple[float, float, float]:
        """Tokens of a message without text, of each further one, and of a character."""
        short, long = 500, 4000
        text = fresh_text("probe", long)
        few = await self._count([{"role": "user", "content": text[:short]}])
        many = await self._count([{"role": "user", "content": text}])
        talk = [text[:short], text[short : 2 * short], text[2 * short : 3 * short]]
        roles = ("user", "assistant", "user")
        three = await self._count(
            [{"role": role, "content": part} for role, part in zip(roles, talk, strict=True)]
        )
        per_character = (many - few) / (long - short)
        per_message = (three - few - 2 * short * per_character) / 2
        return few - short * per_character, per_message, per_character

    async def ids(self, text: str) -> list[int]:
        raise PdctlError(
            "prompts of token ids need a tokenizer: give --tokenizer FOLDER or --endpoint chat",
            2,
        )


async def text_to_fill(
    tokenizer: Tokenizer, messages: Messages, role: str, seed: str, target: int
) -> str:
    """New text with which the messages become a prompt of exactly ``target`` tokens.

    Raises:
        PdctlError: no text does that (the history is longer already).
    """

    async def count(characters: int) -> int:
        message = {"role": role, "content": fresh_text(seed, characters)}
        return await tokenizer.count_chat([*messages, message])

    return fresh_text(seed, await _characters_for(count, target))


async def text_of_tokens(tokenizer: Tokenizer, role: str, seed: str, tokens: int) -> str:
    """New text that adds about ``tokens`` tokens; exact where single tokens can be added."""

    async def count(characters: int) -> int:
        message = {"role": role, "content": fresh_text(seed, characters)}
        return await tokenizer.count_chat([message]) - overhead

    overhead = await tokenizer.count_chat([{"role": role, "content": ""}])
    return fresh_text(seed, await _characters_for(count, tokens, nearest=True))


async def _characters_for(
    count: Callable[[int], Awaitable[int]], target: int, nearest: bool = False
) -> int:
    """The length of text that gives ``target`` tokens: by regula falsi, then step by step."""
    least = 1
    low, at_low = least, await count(least)
    if at_low > target and not nearest:
        raise PdctlError(
            f"a prompt of {target} tokens cannot be made: the history alone has about {at_low}"
        )
    if at_low >= target:
        return low
    high, at_high = low + max(16, target - at_low), at_low
    tries = 0
    while (at_high := await count(high)) < target and tries < _MOST_TRIES:
        grown = max(high - low, 16)
        low, at_low = high, at_high
        high = high + 2 * grown
        tries += 1
    while high - low > 1 and tries < _MOST_TRIES:
        if at_high == target:
            return high
        if at_low == target:
            return low
        share = (target - at_low) / max(at_high - at_low, 1)
        middle = min(high - 1, max(low + 1, low + round(share * (high - low))))
        at_middle = await count(middle)
        if at_middle < target:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
        tries += 1
    if at_high == target:
        return high
    # A character more can add two tokens or take one away: look around.
    for step in range(1, 24):
        for characters in (high + step, max(least, low - step)):
            if await count(characters) == target:
                return characters
    if nearest:
        return low
    raise PdctlError(f"no text gives a prompt of exactly {target} tokens")


async def ids_of_tokens(tokenizer: Tokenizer, seed: str, tokens: int) -> list[int]:
    """Exactly ``tokens`` ids of new text."""
    characters = tokens * 3 + 32
    while True:
        ids = await tokenizer.ids(fresh_text(seed, characters))
        if len(ids) >= tokens:
            return ids[:tokens]
        characters *= 2
