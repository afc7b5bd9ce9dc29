"""Whatever a client asks, the router answers as one engine alone does, or refuses it as clearly."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pd_connector import contract
from pdctl.conversation import user_text

from .conftest import Deployment

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
COUNT = f"{MESSAGES}/count_tokens"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
USAGE = {"include_usage": True}
# No log-probabilities that are granted: a CPU engine compiles for 17 s before its first.
TURNS: list[dict[str, Any]] = [
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream": True, "stream_options": 5},
    {"stream_options": USAGE},
    {"stream": "false"},
    {"stream": "maybe"},
    {"max_tokens": 0},
    {"max_tokens": 100_000},
    {"max_tokens": "5"},
    {"max_tokens": None, "stop_token_ids": [*range(20, 90)]},
    {"min_tokens": 10},
    {"n": 0},
    {"n": 2},
    {"n": 2, "temperature": 1, "seed": 7},
    {"n": 2, "temperature": 1, "seed": 7, "stream": True, "stream_options": USAGE},
    {"n": 1_000_000},
    {"n": 1.5},
    {"best_of": 2},
    {"temperature": "hot"},
    {"top_p": 2},
    {"seed": 2**70},
    {"stop": ["e", "a"]},
    {"stop": 5},
    {"logit_bias": {"40": 100}},
    {"logit_bias": {"999999": 1}},
    {"allowed_token_ids": [40, 41]},
    {"truncate_prompt_tokens": 4},
    {"return_token_ids": True},
    {"return_token_ids": True, "stream": True},
    {"use_beam_search": True, "n": 2},
    {"model": "nobody"},
    {"model": 5},
    {"cache_salt": 5},
    {"priority": "x"},
    {"vllm_xargs": 5},
    {"user": "u", "metadata": {"a": "b"}, "store": True, "unknown_field": 1},
    {"response_format": {"type": "json_object"}, "max_tokens": 8},
    {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 40,
    },
    {"response_format": {"type": "nonsense"}},
    {"response_format": {"type": "json_schema"}},
    {"structured_outputs": {"regex": "[ab]{3}"}},
    {"structured_outputs": {"regex": "["}},
    {"structured_outputs": {"choice": ["a"], "regex": "b"}},
]
CHATS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 1000},
    {"top_logprobs": 2},
    {"max_completion_tokens": 3},
    {"max_completion_tokens": -2},
    {"echo": True},
    {"add_generation_prompt": False},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
    {"tools": 5},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"messages": []},
    {"messages": [1]},
    {"messages": [{"role": "alien", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"chat_template": "{{ 'x' }}"},
    {"chat_template_kwargs": 5},
    {"reasoning_effort": "mega"},
]
TEXTS: list[dict[str, Any]] = [
    {"logprobs": 1000},
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "stream": True},
    {"suffix": "x"},
    {"prompt": ["a", "b"]},
    {"prompt": [40, 41, 42]},
    {"prompt": [[40], [41]]},
    {"prompt": [10**9]},
    {"prompt": ["a", 5]},
    {"prompt_embeds": "AAAA"},
]
RESPONSE: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"instructions": "be brief"},
    {"input": [{"role": "user", "content": "hi"}]},
    {"input": 5},
    {"model": "nobody"},
    {"max_output_tokens": -1},
    {"previous_response_id": "resp_nobody"},
    {"previous_response_id": "nobody"},
    {"background": True, "store": False},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    {"include": ["nonsense"]},
    {"prompt": {"id": "x"}},
]
MESSAGE: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"system": "be brief"},
    {"stop_sequences": ["e"]},
    {"messages": []},
    {"messages": "x"},
    {"model": "nobody"},
    {"max_tokens": -1},
    {"max_tokens": 100_000},
    {"temperature": "hot"},
    {"tool_choice": {"type": "nobody"}},
    {"stream": True, "max_tokens": -1},
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    (COUNT, {"messages": [{"role": "user", "content": "hello there"}]}),
    (COUNT, {"messages": "x"}),
    (COUNT, {"model": "nobody", "messages": [{"role": "user", "content": "hello there"}]}),
    ("/tokenize", {"prompt": "hello there", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hello there"}]}),
    ("/tokenize", {"prompt": 5}),
    ("/detokenize", {"tokens": [40, 41]}),
    ("/detokenize", {"tokens": [10**9]}),
    ("/detokenize", {"tokens": ["x"]}),
    ("/v1/embeddings", {"input": "x"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
]
# What both paths take is asked of one of them: the router's way is the same.
FIELDS: dict[str, list[dict[str, Any]]] = {
    CHAT: TURNS[::2] + CHATS,
    TEXT: TURNS[1::2] + TEXTS,
    RESPONSES: RESPONSE,
    MESSAGES: MESSAGE,
}
CASES = [(path, fields) for path in FIELDS for fields in FIELDS[path]] + OTHERS


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A request that no cache has seen."""
    text = user_text(uuid.uuid4().hex, 150)
    messages = [{"role": "user", "content": text}]
    usual: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages, "max_tokens": 6, "temperature": 0},
        TEXT: {"prompt": text, "max_tokens": 6, "temperature": 0},
        RESPONSES: {"input": text, "max_output_tokens": 6, "temperature": 0},
        MESSAGES: {"messages": messages, "max_tokens": 6, "temperature": 0},
    }
    return {"model": "canary", **usual.get(path, {}), **fields}


@pytest.mark.parametrize(
    ("path", "fields"), CASES, ids=[f"{path} {json.dumps(fields)[:60]}" for path, fields in CASES]
)
def test_the_answer_is_an_engines_own(
    deployment: Deployment, path: str, fields: dict[str, Any]
) -> None:
    body = body_of(path, fields)
    urls = (deployment.router_url, deployment.prefill_url)
    with ThreadPoolExecutor() as both:
        asked = [both.submit(deployment.client.post, f"{url}{path}", json=body) for url in urls]
        through, direct = (each.result() for each in asked)
    seen = through.content + repr(through.headers.raw).encode()
    secrets = [contract.KV_TRANSFER_PARAMS, "remote_", "pd_tokens", f"{deployment.name}-"]
    engines = (deployment.prefill_url, deployment.decode_url)
    secrets += [url.removeprefix("http://") for url in engines]
    assert [secret for secret in secrets if secret.encode() in seen] == []
    assert through.status_code == direct.status_code, (through.text, direct.text)
    if direct.status_code == 200:
        assert said(through) == said(direct)
    else:
        assert refused(through, path) == refused(direct)


def said(response: httpx.Response) -> Any:
    """What an answer says, less names, times and what the caches had.

    A stream's pieces are put together: where it is cut depends on how fast it is read.
    """
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        events = [bare(json.loads(line)) for line in lines if line != "[DONE]"]
        return joined(events), lines[-1] == "[DONE]"
    return bare(response.json())


VARYING = frozenset(
    """
    id created created_at completed_at item_id system_fingerprint cached_tokens
    cached_tokens_per_turn cache_read_input_tokens cache_creation_input_tokens
    created_cache_tokens sequence_number
    """.split()
)
BETWEEN_ENGINES = frozenset({contract.KV_TRANSFER_PARAMS, "ec_transfer_params"})


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:
            # Anthropic's input_tokens are those that no cache had or took in.
            caches = ("cache_read_input_tokens", "cache_creation_input_tokens")
            tokens = value["input_tokens"] + sum(value[name] or 0 for name in caches)
            value = value | {"input_tokens": tokens}
        dropped = VARYING | BETWEEN_ENGINES
        return {name: bare(item) for name, item in value.items() if name not in dropped}
    if isinstance(value, list):
        return [bare(item) for item in value]
    # The same number, computed in another batch.
    return round(value, 3) if isinstance(value, float) else value


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kinds of events, texts by choice, and the last of everything else."""
    texts: dict[Any, str] = {}
    last: dict[str, Any] = {}
    kinds = []
    for event in events:
        kind = event.get("type", event.get("object"))
        if kinds[-1:] != [kind]:
            kinds.append(kind)
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            text = delta.get("content", delta.get("text"))
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
            if choice.get("finish_reason"):
                last[f"finish of {choice['index']}"] = choice["finish_reason"]
        if "choices" not in event:
            delta = event.get("delta")
            text = delta if isinstance(delta, str) else (delta or {}).get("text", "")
            texts[kind] = texts.get(kind, "") + text
        if event.get("usage"):
            last["usage"] = event["usage"]
        if event.get("response"):
            last["response"] = event["response"]
    return {"kinds": kinds, "texts": texts, **last}


def refused(response: httpx.Response, path: str | None = None) -> str:
    """What a refusal says; with ``path``: in that path's own form."""
    body = response.json()
    if path is not None:
        assert (body.get("type") == "error") == path.startswith(MESSAGES), body
        assert isinstance(body["error"]["type"], str), body
    message: str = body["error"]["message"] if "error" in body else body["detail"]
    return message


def test_models_are_the_engines(deployment: Deployment) -> None:
    through = deployment.client.get(f"{deployment.router_url}/v1/models").json()
    direct = deployment.client.get(f"{deployment.decode_url}/v1/models").json()
    for models in (through, direct):
        for model in models["data"]:
            del model["created"], model["permission"]
    assert through == direct
