"""Both engines traced, prefill with a prefix cache of its own, decode with little memory: the pair
that the connector's tests share."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_connector import contract
from pd_connector.secret import lease_key
from tests.otlp import Receiver

from .conftest import Deployment

TOKENS = 16
ALONE = {contract.DO_REMOTE_DECODE: False, contract.DO_REMOTE_PREFILL: False}
"""Decode computes the prompt itself and keeps the turn."""
FRESH = {contract.DO_REMOTE_DECODE: True, contract.DO_REMOTE_PREFILL: False}


TOOL_ARGS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
DECODE_ARGS = [
    "--num-gpu-blocks-override",
    "96",
    "--reasoning-parser",
    "qwen3",
    "--structured-outputs-config",
    '{"enable_in_reasoning": true}',
]


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def pair(deployment: Deployment, receiver: Receiver) -> Iterator["Pair"]:
    spec = deployment.spec
    kept = {key: spec.get(key) for key in ("observability", "prefill", "engine", "kv_transfer")}
    spec["observability"] = {
        **spec["observability"],
        "otlp_endpoint": receiver.url,
        "otlp_protocol": "http/protobuf",
    }
    spec["prefill"] = {**spec["prefill"], "prefix_caching": True}
    spec["kv_transfer"] = {**spec["kv_transfer"], "decode_ttl": "300s"}
    args = {**spec["engine"]["extra_args"], "all": TOOL_ARGS, "decode": DECODE_ARGS}
    env = spec["engine"]["env"] | {"VLLM_ENABLE_RESPONSES_API_STORE": 1}
    spec["engine"] = {**spec["engine"], "extra_args": args, "env": env}
    deployment.write()
    deployment.pdctl("up", "SPEC", "--bidir", "on")
    yield Pair(deployment, receiver)
    spec.update(kept)
    deployment.write()


class Turn:
    """A prompt's answer on prefill and all that was told of it."""

    def __init__(self, answer: dict[str, Any], trace_id: str, parent_id: str) -> None:
        self.text = answer["choices"][0]["text"]
        self.params = answer[contract.KV_TRANSFER_PARAMS]
        self.reuse = self.params[contract.PD_REUSE]
        self.trace_id, self.parent_id = trace_id, parent_id


class Pair:
    def __init__(self, deployment: Deployment, receiver: Receiver) -> None:
        self.deployment = deployment
        self.receiver = receiver
        self.client = httpx.Client(timeout=60, trust_env=False)
        secret = deployment.folder / "state" / deployment.name / "secret"
        self.key = {contract.LEASE_KEY_HEADER: lease_key(secret.read_bytes().strip())}

    def post(self, url: str, params: Any, prompt: str, tokens: int, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        body = {"model": "canary", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= more | ({contract.KV_TRANSFER_PARAMS: params} if params is not None else {})
        response = self.client.post(f"{url}/v1/completions", json=body, headers=headers)
        response.raise_for_status()
        return response

    def kept_turn(self, prompt: str) -> tuple[str, dict[str, Any]]:
        """A turn that decode alone has computed and keeps: its text and its handle."""
        answer = self.post(self.deployment.decode_url, ALONE, prompt, TOKENS).json()
        return prompt + answer["choices"][0]["text"], answer[contract.KV_TRANSFER_PARAMS]

    def prefill(self, prompt: str, params: dict[str, Any]) -> Turn:
        trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
        headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
        answer = self.post(self.deployment.prefill_url, params, prompt, 1, headers=headers).json()
        return Turn(answer, trace_id, parent_id)

    def decode(self, prompt: str, turn: Turn, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.post(
            self.deployment.decode_url, turn.params, prompt, TOKENS, **more
        ).json()
        return answer

    def plain(self, prompt: str) -> str:
        """Prefill's own answer, its prefix cache kept out by a salt."""
        answer = self.post(
            self.deployment.prefill_url, None, prompt, TOKENS, cache_salt=secrets.token_hex(4)
        )
        text: str = answer.json()["choices"][0]["text"]
        return text

    def metrics(self, url: str) -> Callable[..., float]:
        text = self.client.get(f"{url}/metrics").text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]

        def value(name: str, **labels: str) -> float:
            return sum(
                s.value
                for s in samples
                if s.name == name and labels.items() <= {**s.labels}.items()
            )

        return value

    def leases(self, **order: Any) -> dict[str, Any]:
        url = f"{self.deployment.decode_url}{contract.ENGINE_LEASES_PATH}"
        method = "POST" if order else "GET"
        response = self.client.request(method, url, json=order or None, headers=self.key)
        response.raise_for_status()
        body: dict[str, Any] = response.json()
        return body

    def decode_pid(self) -> int:
        pid: int = self.deployment.status()["decode-0"]["pid"]
        return pid


def pinned(pair: Pair) -> set[str]:
    return {turn["id"] for turn in pair.leases()["turns"]}
