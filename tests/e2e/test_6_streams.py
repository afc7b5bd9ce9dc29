"""A streamed answer carries the handle that the same answer carries when it is not streamed,
whatever is asked of it."""

import json
import secrets
from typing import Any

import pytest

from pd_connector import contract
from pdctl.conversation import user_text
from tests.waiting import until

from .pair import ALONE, TOKENS, Pair, pinned

pytestmark = pytest.mark.e2e_connector

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
TWO = {"n": 2, "temperature": 1, "seed": 7, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat, usage": (CHAT, {"stream_options": {"include_usage": True}}),
    "chat, usage in every chunk": (
        CHAT,
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat, two answers": (CHAT, TWO),
    "chat, stopped by a token": (CHAT, {"stop_token_ids": [*range(30, 60)], "max_tokens": 64}),
    "chat, no reasoning in the answer": (CHAT, {"include_reasoning": False}),
    "chat, named tool": (
        CHAT,
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "max_tokens": 64,
            **NOT_THINKING,
        },
    ),
    "chat, required tool": (
        CHAT,
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 96, **NOT_THINKING},
    ),
    "chat, a tool if it likes": (CHAT, {"tools": [TOOL], "tool_choice": "auto"}),
    "chat, token ids": (CHAT, {"return_token_ids": True}),
    "text": (TEXT, {}),
    "text, two answers": (TEXT, TWO),
    "text, echo": (TEXT, {"echo": True}),
    "text, usage": (TEXT, {"stream_options": {"include_usage": True}}),
    "responses": (RESPONSES, {}),
}


def body_of(path: str, text: str, more: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "canary", "temperature": 0, contract.KV_TRANSFER_PARAMS: ALONE}
    if path == CHAT:
        return body | {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS} | more
    if path == TEXT:
        return body | {"prompt": text, "max_tokens": TOKENS} | more
    return body | {"input": text, "max_output_tokens": TOKENS} | more


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def told(handle: dict[str, Any], same_tokens: bool = True) -> dict[str, Any]:
    """What two handles of the same turn have in common."""
    blocks = [len(group) for group in handle[contract.REMOTE_BLOCK_IDS]]
    own = [contract.REMOTE_NUM_TOKENS, contract.PD_LEASE, "tp_size"]
    if same_tokens:
        own.append(contract.PD_TOKENS)
    return {name: handle[name] for name in own} | {"blocks": blocks}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_handle_is_that_of_the_answer_in_one_piece(pair: Pair, name: str) -> None:
    path, more = REQUESTS[name]
    url = f"{pair.deployment.decode_url}{path}"
    body = body_of(path, user_text(secrets.token_hex(4), 300), more)
    plain = {key: value for key, value in body.items() if key != "stream_options"}
    pair.leases(release=sorted(pinned(pair)))
    whole = pair.client.post(url, json=plain)
    assert whole.status_code == 200, whole.text
    expected = whole.json()[contract.KV_TRANSFER_PARAMS]
    assert expected[contract.DO_REMOTE_DECODE]

    streamed = pair.client.post(url, json=body | {"stream": True})
    assert streamed.status_code == 200, streamed.text
    chunks = events(streamed.text)
    if path == RESPONSES:
        assert chunks[-1]["type"] == "response.completed"
        carriers = [chunks[-1]["response"]]
    else:
        assert streamed.text.rstrip().endswith("data: [DONE]")
        carriers = [chunk for chunk in chunks if contract.KV_TRANSFER_PARAMS in chunk]
        finishing = [c for c in chunks if c["choices"] and c["choices"][0].get("finish_reason")]
        assert len(finishing) == more.get("n", 1)
        assert carriers == finishing[-1:]
    (carrier,) = carriers
    same_tokens = "n" not in more
    handle = carrier[contract.KV_TRANSFER_PARAMS]
    assert told(handle, same_tokens) == told(expected, same_tokens)
    # Only what was handed out is kept, of two answers as of one.
    handed = {each[contract.REMOTE_REQUEST_ID] for each in (expected, handle)}
    until("nothing else is kept", lambda: pinned(pair) == handed, 10)


def test_a_tool_call_is_one_in_the_stream(pair: Pair) -> None:
    """The matrix would not notice if no tool was ever called."""
    body = body_of(CHAT, "call it", REQUESTS["chat, named tool"][1]) | {"stream": True}
    text = pair.client.post(f"{pair.deployment.decode_url}{CHAT}", json=body).text
    deltas = [c["choices"][0]["delta"] for c in events(text) if c["choices"]]
    assert any(delta.get("tool_calls") for delta in deltas), text


def test_a_stop_string_leaves_no_handle_either_way(pair: Pair) -> None:
    """vLLM's server finds stop strings itself and aborts the request in the engine: as for a
    client that left, nothing is kept."""
    body = body_of(CHAT, "until a vowel", {"stop": ["a", "e", "o", " "], "max_tokens": 400})
    url = f"{pair.deployment.decode_url}{CHAT}"
    pair.leases(release=sorted(pinned(pair)))
    whole = pair.client.post(url, json=body).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole[contract.KV_TRANSFER_PARAMS] is None
    streamed = pair.client.post(url, json=body | {"stream": True}).text
    assert contract.KV_TRANSFER_PARAMS not in streamed
    until("nothing is kept", lambda: pinned(pair) == set())


def test_an_aborted_stream_keeps_nothing(pair: Pair) -> None:
    pair.leases(release=sorted(pinned(pair)))
    url = pair.deployment.decode_url
    body = body_of(CHAT, "for long", {"max_tokens": 3000, "ignore_eos": True, "stream": True})
    with pair.client.stream("POST", f"{url}{CHAT}", json=body) as stream:
        next(stream.iter_lines())
    running = "vllm:num_requests_running"
    until("decode is idle", lambda: pair.metrics(url)(running) == 0)
    until("no block is in use", lambda: pair.metrics(url)("vllm:kv_cache_usage_perc") == 0)
    assert pinned(pair) == set()
