"""Tools and stored responses through the router, on legs that are set up for them."""

import json
import secrets
from typing import Any

import httpx
import pytest

from pd_connector import contract
from pd_connector.contract import Outcome
from pdctl.conversation import user_text
from tests.waiting import until

from .pair import Pair
from .test_6_streams import CHAT, NOT_THINKING, RESPONSES, TOOL, events

NAMED = {"type": "function", "function": {"name": "f"}}


def ask(pair: Pair, url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = pair.client.post(f"{url}{path}", json={"model": "canary", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    assert contract.KV_TRANSFER_PARAMS not in answer.text or url != pair.deployment.router_url
    return answer


def through(pair: Pair, path: str, body: dict[str, Any]) -> httpx.Response:
    return ask(pair, pair.deployment.router_url, path, body)


def plain(pair: Pair, path: str, body: dict[str, Any]) -> httpx.Response:
    """One engine alone, its prefix cache kept out by a salt."""
    salted = body | {"cache_salt": secrets.token_hex(4)}
    return ask(pair, pair.deployment.decode_url, path, salted)


def terse(pair: Pair) -> dict[str, Any]:
    """No white space between the parts of a call, of which the model would make much."""
    spaces = ask(pair, pair.deployment.decode_url, "/tokenize", {"prompt": " \n\t"}).json()[
        "tokens"
    ]
    return NOT_THINKING | {"logit_bias": {str(token): -100 for token in spaces}}


def message_of(answer: httpx.Response) -> dict[str, Any]:
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_an_agents_turns_with_tools(pair: Pair, choice: Any) -> None:
    text = user_text(secrets.token_hex(8), 500)
    body = {
        "messages": [{"role": "user", "content": text}],
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 64,
        "conversation_id": secrets.token_hex(8),
        **terse(pair),
    }
    first, alone = through(pair, CHAT, body), plain(pair, CHAT, body)
    assert first.headers[contract.HEADER_REUSE] == Outcome.MISS.value
    message = message_of(first)
    assert message["content"] == message_of(alone)["content"]
    assert calls_of(message) == calls_of(message_of(alone))
    assert len(calls_of(message)) == (choice != "auto")
    kept = {name: message.get(name) for name in ("role", "content", "tool_calls")}
    kept = {name: value for name, value in kept.items() if value}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "true"}
        for call in message.get("tool_calls", ())
    ]
    body["messages"] = [*body["messages"], kept, *results, {"role": "user", "content": "go on"}]
    second, alone = message_of(through(pair, CHAT, body)), message_of(plain(pair, CHAT, body))
    assert (second["content"], calls_of(second)) == (alone["content"], calls_of(alone))


def test_a_streamed_tool_call_is_the_whole_ones(pair: Pair) -> None:
    text = user_text(secrets.token_hex(8), 300)
    body = {
        "messages": [{"role": "user", "content": text}],
        "tools": [TOOL],
        "tool_choice": NAMED,
        "max_tokens": 64,
        **terse(pair),
    }
    chunks = events(through(pair, CHAT, body | {"stream": True}).text)
    parts = [
        part["function"].get("arguments") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        for part in choice["delta"].get("tool_calls") or ()
    ]
    assert [("f", json.loads("".join(parts)))] == calls_of(message_of(plain(pair, CHAT, body)))


def output(answer: Any) -> str:
    text: str = answer["output"][0]["content"][0]["text"]
    return text


def stored(pair: Pair, name: str) -> dict[str, Any]:
    answer = pair.client.get(f"{pair.deployment.router_url}{RESPONSES}/{name}")
    assert answer.status_code == 200, answer.text
    assert contract.KV_TRANSFER_PARAMS not in answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stored_response_is_found_and_continued(pair: Pair, stream: bool) -> None:
    text = user_text(secrets.token_hex(8), 300)
    body = {"input": text, "max_output_tokens": 16, "store": True}
    answer = through(pair, RESPONSES, body | {"stream": stream})
    first = events(answer.text)[-1]["response"] if stream else answer.json()
    assert output(first) == output(plain(pair, RESPONSES, body | {"store": False}).json())
    assert output(stored(pair, first["id"])) == output(first)
    more = {"input": "go on", "previous_response_id": first["id"], "max_output_tokens": 16}
    second = through(pair, RESPONSES, more).json()
    alone = ask(pair, pair.deployment.decode_url, RESPONSES, more).json()
    assert output(second) == output(alone)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert second["usage"]["input_tokens"] == alone["usage"]["input_tokens"]


def test_a_background_response_is_awaited_and_another_cancelled(pair: Pair) -> None:
    text = user_text(secrets.token_hex(8), 300)
    body = {"input": text, "max_output_tokens": 16, "background": True}
    name = through(pair, RESPONSES, body).json()["id"]
    until("it is done", lambda: stored(pair, name)["status"] not in ("queued", "in_progress"))
    alone = plain(pair, RESPONSES, body | {"background": False}).json()
    assert output(stored(pair, name)) == output(alone)

    name = through(pair, RESPONSES, body | {"max_output_tokens": 4000}).json()["id"]
    url = f"{pair.deployment.router_url}{RESPONSES}/{name}/cancel"
    assert pair.client.post(url).json()["status"] == "cancelled"
    running = "vllm:num_requests_running"
    until("decode is idle", lambda: pair.metrics(pair.deployment.decode_url)(running) == 0)


def test_what_is_not_stored_is_not_found(pair: Pair) -> None:
    for method, path in (("GET", "resp_nobody"), ("POST", "resp_nobody/cancel")):
        url = f"{pair.deployment.router_url}{RESPONSES}/{path}"
        answer = pair.client.request(method, url)
        assert answer.status_code == 404
        assert "resp_nobody" in json.dumps(answer.json()["error"]["message"])
