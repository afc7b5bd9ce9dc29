"""Turns driven over the two engines without the router, as a router would."""

import json
import time
from typing import Any

import httpx
import msgspec
import zmq

from pd_connector import contract

from .conftest import Deployment

COMPLETIONS = "/v1/completions"
ASK = {contract.DO_REMOTE_DECODE: True, contract.DO_REMOTE_PREFILL: False}


def completion(
    deployment: Deployment, url: str, prompt: str, tokens: int, params: Any = None, **more: Any
) -> httpx.Response:
    """One completion of one engine."""
    body = {
        "model": deployment.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        **more,
    }
    if params is not None:
        body[contract.KV_TRANSFER_PARAMS] = params
    return deployment.client.post(f"{url}{COMPLETIONS}", json=body)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def params_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    params: dict[str, Any] = response.json()[contract.KV_TRANSFER_PARAMS]
    return params


def turn(
    deployment: Deployment, prompt: str, handle: dict[str, Any] | None = None, tokens: int = 16
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A turn over both legs: its text, what prefill says of reuse, decode's handle."""
    prefilled = params_of(completion(deployment, deployment.prefill_url, prompt, 1, handle or ASK))
    reuse = prefilled.pop(contract.PD_REUSE, {})
    decoded = completion(deployment, deployment.decode_url, prompt, tokens, prefilled)
    return text_of(decoded), reuse, params_of(decoded)


def plain(deployment: Deployment, prompt: str, tokens: int = 16) -> str:
    """What prefill, which has no prefix cache, answers alone."""
    return text_of(completion(deployment, deployment.prefill_url, prompt, tokens))


def decode_alone(deployment: Deployment, prompt: str, tokens: int = 16) -> str:
    """What decode answers alone, out of its prefix cache."""
    return text_of(completion(deployment, deployment.decode_url, prompt, tokens))


def metric(deployment: Deployment, url: str, name: str, **labels: str) -> float:
    """The sum of an engine's samples of this name that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = deployment.client.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((name + "{", name + " ")) and all(label in line for label in wanted)
    )


def settings(deployment: Deployment, url: str) -> dict[str, Any]:
    answer = deployment.client.get(f"{url}{contract.ENGINE_SETTINGS_PATH}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def side_channel(port: int, *messages: bytes) -> None:
    """Send messages to a handshake listener and wait for no answer."""
    context = zmq.Context()
    try:
        for message in messages:
            with context.socket(zmq.DEALER) as sender:
                sender.connect(f"tcp://127.0.0.1:{port}")
                sender.send_multipart([b"", message])
                sender.close(linger=1000)
    finally:
        context.term()


def handshake(port: int, seconds: float = 5) -> bool:
    """Whether a handshake listener answers for rank 0."""
    context = zmq.Context()
    try:
        with context.socket(zmq.REQ) as asker:
            asker.setsockopt(zmq.LINGER, 0)
            asker.connect(f"tcp://127.0.0.1:{port}")
            asker.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            return bool(asker.poll(seconds * 1000)) and len(asker.recv_multipart()) == 2
    finally:
        context.term()


def healthy(deployment: Deployment, url: str) -> bool:
    """Whether an engine still answers a prompt."""
    try:
        return completion(deployment, url, "hello", 1).status_code == 200
    except httpx.HTTPError:
        return False


def streamed_status(deployment: Deployment, url: str, params: Any) -> int:
    """Status of a streamed request."""
    return completion(deployment, url, "hello", 1, params, stream=True).status_code


def seconds(action: Any) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def as_json(value: Any) -> Any:
    """As it looks after a way over the wire."""
    return json.loads(json.dumps(value))
