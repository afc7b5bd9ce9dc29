"""Holding a streamed conversation through the router, and the plain answers to compare with."""

import json
import os
import random
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from pd_connector import contract
from pdctl.errors import PdctlError
from pdctl.spec.model import Benchmark

Messages = list[dict[str, str]]

API_KEY_VARIABLE = "PDCTL_API_KEY"
CA_FILE_VARIABLE = "PDCTL_CA_FILE"
_LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_WORDS = (
    "block cache turn token leg route agent trace span lease prompt answer history tool call "
    "result query table index shard queue batch rank link rail port node fabric memory page"
).split()


@dataclass(frozen=True)
class Turn:
    """One streamed turn as its client saw it. Times are milliseconds.

    ``outcome``, ``prompt_tokens``, ``tokens_read`` and ``prefill_ms`` are what the router said in
    its response headers; None when it said nothing.
    """

    text: str
    finish_reason: str | None
    answer_tokens: int
    ttft_ms: float
    outcome: str | None
    prompt_tokens: int | None
    tokens_read: int | None
    prefill_ms: float | None


def new_client() -> httpx.Client:
    """An HTTP client that goes straight to the legs.

    Environment: ``PDCTL_API_KEY`` is sent to them, ``PDCTL_CA_FILE`` vouches for their
    certificates. What a router on this machine shows is not checked: nothing leaves it.
    """
    key, authority = os.environ.get(API_KEY_VARIABLE), os.environ.get(CA_FILE_VARIABLE)
    return httpx.Client(
        timeout=_TIMEOUT,
        trust_env=False,
        headers={"Authorization": f"Bearer {key}"} if key else None,
        verify=ssl.create_default_context(cafile=authority) if authority else True,
        mounts={f"https://{host}": httpx.HTTPTransport(verify=False) for host in _LOOPBACK},
    )


def user_text(seed: str, characters: int) -> str:
    """Text of exactly this length that no cache has seen under another seed."""
    draw = random.Random(seed)
    text = f"[{seed}]"
    while len(text) < characters:
        text += f" {draw.choice(_WORDS)} {draw.randrange(1000)}"
    return text[:characters]


def turn_text(benchmark: Benchmark, seed: str, number: int) -> str:
    """New text of a turn, counted from 1, of the conversation that a spec describes."""
    first = number == 1
    length = benchmark.first_turn_chars if first else benchmark.new_chars_per_turn
    return user_text(f"{seed}-{number}", length)


def stream_turn(
    client: httpx.Client,
    router_url: str,
    model: str,
    messages: Messages,
    answer_tokens: int,
    conversation: str,
    route: contract.Route | None = None,
) -> Turn:
    """Send one turn through the router and read its stream to the end.

    Args:
        route: RECOMPUTE or READBACK pins this turn's route; None leaves it to the router.

    Raises:
        PdctlError: no answer, an error answer, an error in the stream, or a broken stream.
    """
    body = _body(model, messages, answer_tokens) | {
        "stream": True,
        "stream_options": {"include_usage": True},
        contract.CONVERSATION_ID: conversation,
    }
    headers_sent = {} if route is None else {contract.HEADER_ROUTE: route.value}
    begin = time.perf_counter()
    first = None
    text, finish_reason, done, tokens = "", None, False, 0
    try:
        with client.stream(
            "POST", f"{router_url}/v1/chat/completions", json=body, headers=headers_sent
        ) as response:
            if response.status_code != 200:
                response.read()
                raise PdctlError(f"the router answers {response.status_code}: {_reason(response)}")
            headers = response.headers
            for event in _events(response):
                if event == "[DONE]":
                    done = True
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    raise PdctlError(f"the stream broke off: {chunk['error']}")
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk["choices"]:
                    content = choice["delta"].get("content")
                    if content and first is None:
                        first = time.perf_counter()
                    text += content or ""
                    finish_reason = choice.get("finish_reason") or finish_reason
    except httpx.HTTPError as error:
        raise PdctlError(f"{router_url}: {error or type(error).__name__}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PdctlError(f"{router_url}: the stream is no chat completion ({error!r})") from None
    if not done or first is None:
        raise PdctlError(f"{router_url}: the stream ended without an answer")
    return Turn(
        text=text,
        finish_reason=finish_reason,
        answer_tokens=tokens,
        ttft_ms=(first - begin) * 1000,
        outcome=headers.get(contract.HEADER_REUSE),
        prompt_tokens=_number(headers.get(contract.HEADER_PROMPT_TOKENS), int),
        tokens_read=_number(headers.get(contract.HEADER_TOKENS_READ), int),
        prefill_ms=_number(headers.get(contract.HEADER_PREFILL_MS), float),
    )


def plain_answer(
    client: httpx.Client, engine_url: str, model: str, messages: Messages, answer_tokens: int
) -> str:
    """The answer of one engine alone: no disaggregation, and no cached block of anybody's.

    Raises:
        PdctlError: the engine does not answer 200.
    """
    # A salt of its own keeps prefix caches out, which could hold the very blocks in question.
    body = _body(model, messages, answer_tokens) | {"cache_salt": f"{random.getrandbits(64):x}"}
    try:
        response = client.post(f"{engine_url}/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        raise PdctlError(f"{engine_url}: {error or type(error).__name__}") from None
    if response.status_code != 200:
        raise PdctlError(f"{engine_url} answers {response.status_code}: {_reason(response)}")
    try:
        return str(response.json()["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError) as error:
        raise PdctlError(f"{engine_url}: the answer is no chat completion ({error!r})") from None


def _body(model: str, messages: Messages, answer_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "seed": 0,
    }


def _events(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _number(text: str | None, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text) if text is not None else None
    except ValueError:
        return None
