"""One turn over HTTP: the request, the stream, and what was seen of it."""

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from pd_connector import contract
from pdctl.bench.tokens import Messages

TOKEN_ID_PREFIX = "token_id:"
"""How vLLM writes a token under ``return_tokens_as_token_ids``."""


@dataclass(frozen=True)
class Prompt:
    """Messages for chat, token ids for completions."""

    messages: Messages | None = None
    ids: list[int] | None = None


@dataclass
class Seen:
    """A turn as its client saw it; times are seconds on the performance counter."""

    began: float
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    text: str = ""
    ids: list[int] | None = None
    first_token: str | None = None
    first_logprob: float | None = None
    chunks: int = 0
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    cached_tokens: int | None = None
    headers: dict[str, str] | None = None
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first is None else (self.first - self.began) * 1000

    @property
    def latency_ms(self) -> float | None:
        return None if self.ended is None else (self.ended - self.began) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Between the first and the last token, per token."""
        if self.first is None or self.last is None or (self.answer_tokens or 0) < 2:
            return None
        return (self.last - self.first) * 1000 / ((self.answer_tokens or 0) - 1)

    @property
    def answer_digest(self) -> str | None:
        """Equal for equal answers: over the token ids where they are known, else the text."""
        if self.error or self.first is None:
            return None
        answer = json.dumps(self.ids) if self.ids else self.text
        return hashlib.sha256(answer.encode(errors="surrogatepass")).hexdigest()[:16]

    def header(self, name: str, kind: type[int] | type[float] | type[str]) -> Any:
        text = (self.headers or {}).get(name.lower())
        try:
            return None if text is None else kind(text)
        except ValueError:
            return None


@dataclass(frozen=True)
class Target:
    """Where turns go and how a conversation is named to it."""

    url: str
    model: str
    key: str | None = None
    session_header: str | None = None
    """Names the conversation in this header instead of the body's ``conversation_id``."""
    name_conversation: bool = True
    route: str | None = None
    """Asks pdctl's router for this route."""


async def send(
    client: httpx.AsyncClient,
    target: Target,
    prompt: Prompt,
    answer_tokens: int,
    conversation: str,
    salt: str | None,
) -> Seen:
    """Send one turn and read its stream to the end; a failure is in ``error``, never raised."""
    path, body = _request(target, prompt, answer_tokens, salt)
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    if target.name_conversation:
        if target.session_header:
            headers[target.session_header] = conversation
        else:
            body[contract.CONVERSATION_ID] = conversation
    if target.route:
        headers[contract.HEADER_ROUTE] = target.route
    raw = json.dumps(body).encode()
    headers["Content-Type"] = "application/json"
    seen = Seen(time.perf_counter())
    done = False
    try:
        async with client.stream(
            "POST", f"{target.url}{path}", content=raw, headers=headers
        ) as response:
            if response.status_code != 200:
                await response.aread()
                seen.error = f"HTTP {response.status_code}: {_reason(response)}"
                return seen
            seen.headers = {name.lower(): value for name, value in response.headers.items()}
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                event = line[5:].strip()
                if event == "[DONE]":
                    done = True
                    continue
                _take(seen, json.loads(event))
    except httpx.HTTPError as error:
        seen.error = str(error) or type(error).__name__
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        seen.error = f"the stream is no completion ({error!r})"
    seen.ended = time.perf_counter()
    if seen.error is None and (not done or seen.first is None):
        seen.error = "the stream ended without an answer"
    return seen


def _request(
    target: Target, prompt: Prompt, answer_tokens: int, salt: str | None
) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if salt:
        body["cache_salt"] = salt
    if prompt.ids is None:
        return "/v1/chat/completions", body | {"messages": prompt.messages}
    # Ids of the answer, for the next prompt: return_token_ids would send the prompt's ids back.
    return "/v1/completions", body | {
        "prompt": prompt.ids,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }


def _take(seen: Seen, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        error = chunk["error"]
        message = error.get("message") if isinstance(error, dict) else error
        seen.error = f"the stream broke off: {message}"
        return
    if usage := chunk.get("usage"):
        seen.answer_tokens = usage.get("completion_tokens", seen.answer_tokens)
        seen.prompt_tokens = usage.get("prompt_tokens", seen.prompt_tokens)
        details = usage.get("prompt_tokens_details") or {}
        seen.cached_tokens = details.get("cached_tokens", seen.cached_tokens)
    for choice in chunk["choices"]:
        _take_choice(seen, choice)


def _take_choice(seen: Seen, choice: dict[str, Any]) -> None:
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning") or ""
    tokens = ((choice.get("logprobs") or {}).get("tokens") or []) if "text" in choice else []
    if not (text or tokens or delta.get("tool_calls")):
        return
    now = time.perf_counter()
    seen.last = now
    seen.chunks += 1
    seen.text += text
    if tokens:
        ids = [int(token.removeprefix(TOKEN_ID_PREFIX)) for token in tokens]
        seen.ids = [*(seen.ids or []), *ids]
    if seen.first is None:
        seen.first = now
        seen.first_token = str(tokens[0]) if tokens else text
        seen.first_logprob = _first_logprob(choice) if tokens else None


def _first_logprob(choice: dict[str, Any]) -> float | None:
    values = choice["logprobs"].get("token_logprobs") or [None]
    return values[0] if isinstance(values[0], int | float) else None


def _reason(response: httpx.Response) -> str:
    try:
        error = response.json()
        return str(error["error"]["message"] if "error" in error else error)[:300]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
