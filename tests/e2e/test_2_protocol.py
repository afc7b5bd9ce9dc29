"""What clients see through the router in front of real engines."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pd_connector import contract
from pd_connector.contract import Outcome
from pdctl.conversation import user_text
from tests import fake_engine

from .conftest import ANSWER_TOKENS, Conversation, Deployment


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def chat(text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": "canary", "messages": [message], "max_tokens": 16, "temperature": 0, **more}


def post(deployment: Deployment, path: str, body: dict[str, Any]) -> httpx.Response:
    return deployment.client.post(f"{deployment.router_url}{path}", json=body)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_handle_reaches_the_client(deployment: Deployment, path: str, stream: bool) -> None:
    text = user_text(uuid.uuid4().hex, 300)
    body = chat(text, stream=stream, conversation_id="leak")
    if path == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    response = post(deployment, path, body)
    assert response.status_code == 200
    seen = response.content + repr(response.headers.raw).encode()
    for secret in (contract.KV_TRANSFER_PARAMS, "remote_", f"{deployment.name}-decode-0", "pd_"):
        assert secret.encode() not in seen
    assert response.headers[contract.HEADER_REUSE] in set(Outcome)


def test_answers_that_are_not_streamed_are_reused_too(deployment: Deployment) -> None:
    conversation = uuid.uuid4().hex
    body = chat(user_text(conversation, 500), conversation_id=conversation)
    first = post(deployment, "/v1/chat/completions", body)
    answer = first.json()["choices"][0]["message"]
    body["messages"] += [answer, {"role": "user", "content": "and now?"}]
    second = post(deployment, "/v1/chat/completions", body)
    assert second.headers[contract.HEADER_REUSE] == Outcome.HIT.value
    assert second.json()["choices"][0]["message"]["content"] == deployment.plain(
        [{"role": m["role"], "content": m["content"]} for m in body["messages"]], 16
    )


def test_completions_continue_from_their_text(deployment: Deployment) -> None:
    headers = {"X-Session-ID": uuid.uuid4().hex}
    body: dict[str, Any] = {
        "model": "canary",
        "prompt": user_text(headers["X-Session-ID"], 500),
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
    }
    url = f"{deployment.router_url}/v1/completions"
    first = deployment.client.post(url, json=body, headers=headers)
    body["prompt"] += "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in first.text.splitlines()
        if line.startswith("data: {")
    )
    body |= {"prompt": body["prompt"] + " more", "stream": False}
    second = deployment.client.post(url, json=body, headers=headers)
    plain = deployment.client.post(
        f"{deployment.prefill_url}/v1/completions", json=body | {"cache_salt": "plain"}
    )
    assert second.headers[contract.HEADER_REUSE] == Outcome.HIT.value
    assert second.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]


def test_usage_and_choices_pass_through(deployment: Deployment) -> None:
    text = user_text(uuid.uuid4().hex, 200)
    whole = post(
        deployment, "/v1/chat/completions", chat(text, n=2, max_tokens=4, temperature=1)
    ).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"]["completion_tokens"] == 8
    streamed = post(
        deployment,
        "/v1/chat/completions",
        chat(text, stream=True, stream_options={"include_usage": True}),
    )
    last = [line for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
    assert json.loads(last[6:])["usage"]["completion_tokens"] == 16


def test_the_fake_engine_has_the_real_ones_shapes(deployment: Deployment) -> None:
    _, handle = deployment.finished_turn(user_text("shapes", 300))
    ours = {contract.PD_TOKENS, contract.PD_LEASE, contract.PD_SIGNATURE}
    assert set(handle) == fake_engine.HANDLE_KEYS | ours
    choice_keys = {
        "/v1/chat/completions": fake_engine.CHAT_CHOICE_KEYS | {"token_ids"},
        "/v1/completions": fake_engine.TEXT_CHOICE_KEYS,
    }
    for path, keys in choice_keys.items():
        body = chat("shapes", stream=True, kv_transfer_params={contract.DO_REMOTE_DECODE: False})
        if path == "/v1/completions":
            body["prompt"] = body.pop("messages")[0]["content"]
        streamed = deployment.client.post(f"{deployment.decode_url}{path}", json=body)
        lines = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line[6:]) for line in lines]
        assert set(chunks[-2]) == fake_engine.CHUNK_KEYS
        assert set(chunks[-2]["choices"][0]) == keys
        last = set(chunks[-1]) - {"system_fingerprint"}
        assert last == fake_engine.LAST_CHUNK_KEYS
        if path == "/v1/chat/completions":
            assert set(chunks[-1]["choices"][0]) == fake_engine.LAST_CHAT_CHOICE_KEYS


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_the_fake_engines_other_streams_are_like_the_real_ones(
    deployment: Deployment, path: str
) -> None:
    """Its events, in their order, are among the real ones, and so are their fields."""
    alone = {contract.DO_REMOTE_DECODE: False, contract.DO_REMOTE_PREFILL: False}
    body = chat("shapes", stream=True, kv_transfer_params=alone)
    if path == "/v1/responses":
        body |= {"input": "shapes", "max_output_tokens": 16}
        del body["messages"]
    with started_fake() as fake:
        ours = events_of(httpx.post(f"{fake.url}{path}", json=body).text)
    real = events_of(deployment.client.post(f"{deployment.decode_url}{path}", json=body).text)
    places = [[event["type"] for event in real].index(event["type"]) for event in ours]
    assert places == sorted(places)
    assert ours[-1]["type"] == real[-1]["type"]
    for event, place in zip(ours, places, strict=True):
        assert event.keys() <= real[place].keys()
        for name in ("response", "delta"):
            if isinstance(event.get(name), dict):
                assert event[name].keys() <= real[place][name].keys()
    for events in (ours, real):
        handles = [event.get("response", {}).get(contract.KV_TRANSFER_PARAMS) for event in events]
        assert [bool(handle) for handle in handles if handle] == [True] * (path == "/v1/responses")
        assert bool(handles[-1]) == (path == "/v1/responses")


def test_the_fake_engines_other_answers_are_like_the_real_ones(deployment: Deployment) -> None:
    wrong = {"model": "canary", "messages": "x"}
    unknown = chat("x") | {"model": "nobody"}
    with started_fake() as fake:
        for fault, path, body in (
            (None, "/tokenize", {"prompt": "x"}),
            (400, "/v1/chat/completions", unknown),
            (404, "/v1/messages", unknown),
            (404, "/v1/messages/count_tokens", unknown),
            (fake_engine.UNREAD_400, "/v1/messages", wrong),
            (fake_engine.UNREAD_400, "/v1/chat/completions", wrong),
            (fake_engine.NO_PATH, "/v1/embeddings", {"input": "x"}),
        ):
            fake.faults.extend([fault] if fault else [])
            ours = httpx.post(f"{fake.url}{path}", json=body).json()
            real = deployment.client.post(f"{deployment.decode_url}{path}", json=body).json()
            assert ours.keys() == real.keys(), path
            if isinstance(real.get("error"), dict):
                assert ours["error"].keys() == real["error"].keys(), path


@contextlib.contextmanager
def started_fake() -> Iterator[fake_engine.FakeEngine]:
    fake = fake_engine.FakeEngine("decode").start()
    try:
        yield fake
    finally:
        fake.stop()


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_a_clients_own_handle_is_ignored(deployment: Deployment) -> None:
    # On its own this ends an engine: do_remote_prefill without blocks.
    forged = chat("hello", kv_transfer_params={"do_remote_prefill": True})
    assert post(deployment, "/v1/chat/completions", forged).status_code == 200
    assert set(deployment.status()) and all(
        leg["phase"] == "healthy" for leg in deployment.status().values()
    )


def test_models_health_and_errors(deployment: Deployment) -> None:
    models = deployment.client.get(f"{deployment.router_url}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["canary"]
    assert deployment.client.get(f"{deployment.router_url}/health").status_code == 200
    wrong = post(deployment, "/v1/chat/completions", chat("x", max_tokens=-1))
    assert wrong.status_code == 400
    assert "max_tokens" in wrong.json()["error"]["message"]
    unknown = post(deployment, "/v1/chat/completions", chat("x") | {"model": "nobody"})
    assert unknown.status_code == 404


def test_parallel_turns_of_one_conversation_share_no_handle(deployment: Deployment) -> None:
    conversation = Conversation(deployment)
    conversation.say()
    conversation.messages.append({"role": "user", "content": "twice"})
    first, second = conversation.send(), conversation.send()
    assert first.outcome == Outcome.HIT.value
    # The second reads, if anything, what the first left on decode.
    assert first.text == second.text == deployment.plain(conversation.messages, ANSWER_TOKENS)
