"""Everything that ends reuse: answers stay right, nothing hangs, reuse comes back."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pd_connector import contract
from pd_connector.contract import Outcome
from pdctl.conversation import user_text
from tests.waiting import until

from .conftest import Conversation, Deployment

QUICK = httpx.Timeout(60.0)
"""Far below the 600 s that a hanging request would take, far above a turn's second."""


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.pdctl("up", "SPEC", "--bidir", "on")


@pytest.fixture(autouse=True)
def quick(deployment: Deployment) -> Iterator[None]:
    usual, deployment.client.timeout = deployment.client.timeout, QUICK
    yield
    deployment.client.timeout = usual


def kill_group(leg: dict[str, Any], number: int = signal.SIGKILL) -> None:
    os.killpg(leg["pid"], number)


def healthy(deployment: Deployment, url: str) -> bool:
    try:
        return deployment.client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def prefill_with(deployment: Deployment, text: str, handle: dict[str, Any]) -> str:
    """Prefill's outcome for a prompt that continues a turn; its first token must be right."""
    body = {"model": "canary", "prompt": text + " go on", "max_tokens": 1, "temperature": 0}
    url = f"{deployment.prefill_url}/v1/completions"
    answer = deployment.client.post(url, json=body | {contract.KV_TRANSFER_PARAMS: handle})
    assert answer.status_code == 200
    plain = deployment.client.post(url, json=body).json()
    assert answer.json()["choices"][0]["text"] == plain["choices"][0]["text"]
    outcome: str = answer.json()[contract.KV_TRANSFER_PARAMS][contract.PD_REUSE]["outcome"]
    return outcome


def test_decode_is_killed_between_turns_and_amid_another(deployment: Deployment) -> None:
    stale = deployment.finished_turn(user_text("stale", 400))
    conversation = Conversation(deployment)
    conversation.say()
    decode = deployment.status()["decode-0"]
    body = {
        "model": "canary",
        "messages": [{"role": "user", "content": user_text("amid", 400)}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{deployment.router_url}/v1/chat/completions"
    with deployment.client.stream("POST", url, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        kill_group(decode)
        (*_, last) = (line for line in lines if line)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], "decode-0" in error["message"]) == (502, True)
    assert "127.0.0.1" not in last

    away = deployment.client.post(
        f"{deployment.router_url}/v1/chat/completions",
        json={"model": "canary", "messages": [{"role": "user", "content": "x"}]},
    )
    assert away.status_code == 503
    assert "decode-0" in away.json()["error"]["message"]
    assert "127.0.0.1" not in away.text
    assert deployment.pdctl("status", deployment.name, ok=False).returncode == 1
    assert deployment.status()["decode-0"]["phase"] == "dead"

    healed = deployment.pdctl("up", "SPEC")
    assert "decode-0: does not run any more" in healed.stderr
    assert "prefill-0: runs, unchanged" in healed.stderr
    until("the router sees decode", lambda: healthy(deployment, deployment.router_url))

    turn = conversation.say()
    assert turn.text == conversation.plain()
    assert turn.outcome != Outcome.HIT.value
    turn = conversation.say()
    assert turn.text == conversation.plain()
    assert turn.outcome == Outcome.HIT.value

    # A handle of the engine that is gone, as a router that saw nothing of it would send it.
    assert prefill_with(deployment, *stale) == Outcome.EXPIRED.value


def test_a_handle_is_read_once_and_only_for_its_own_tokens(deployment: Deployment) -> None:
    text, handle = deployment.finished_turn(user_text("own", 400))
    assert prefill_with(deployment, "Z" + text[1:], handle) == Outcome.HISTORY_CHANGED.value
    text, handle = deployment.finished_turn(user_text("once", 400))
    assert prefill_with(deployment, text, handle) == Outcome.HIT.value


def test_a_foreign_port_in_a_handle_is_recomputed(deployment: Deployment) -> None:
    text, handle = deployment.finished_turn(user_text("port", 400))
    handle |= {contract.REMOTE_PORT: 1, contract.REMOTE_ENGINE_ID: "nobody"}
    assert prefill_with(deployment, text, handle) == Outcome.FAILED.value
