"""Everything that ends reuse: answers stay right, nothing hangs, reuse comes back."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_connector import contract, telemetry
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


def test_prefill_with_bidirectional_off_beside_decode_with_it_on(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.pdctl("render", "SPEC", "--bidir", "off", "-o", str(tmp_path))
    kill_group(deployment.status()["prefill-0"], signal.SIGTERM)
    until("prefill has stopped", lambda: deployment.status()["prefill-0"]["phase"] == "dead")
    with (tmp_path / "prefill.log").open("wb") as log:
        off = subprocess.Popen(
            ["bash", str(tmp_path / "prefill-0.sh")],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(
            "prefill with bidirectional off is up",
            lambda: healthy(deployment, deployment.prefill_url),
            300,
        )
        until("the router sees it", lambda: healthy(deployment, deployment.router_url))
        conversation = Conversation(deployment)
        first, second = conversation.say(), conversation.say()
        assert first.outcome == Outcome.MISS.value
        assert second.outcome == Outcome.DISABLED.value
        assert second.tokens_read == 0
        assert second.text == conversation.plain()
    finally:
        os.killpg(off.pid, signal.SIGTERM)
        off.wait(60)


def test_bidirectional_off_is_told_by_verify(deployment: Deployment) -> None:
    changed = deployment.pdctl("up", "SPEC", "--bidir", "off")
    assert "decode-0: changed in the spec, restarting it" in changed.stderr
    result = deployment.pdctl("verify", "SPEC", "--bidir", "off", ok=False)
    assert result.returncode == 1
    assert "FAIL  decode returned a handle" in result.stdout
    conversation = Conversation(deployment)
    conversation.say()
    assert conversation.say().outcome == Outcome.DISABLED.value


def test_a_turn_after_the_decode_ttl(deployment: Deployment) -> None:
    deployment.spec["kv_transfer"]["decode_ttl"] = "2s"
    deployment.spec["router"]["handle_ttl"] = "1s"
    deployment.write()
    # The preflight would not start it.
    deployment.pdctl("up", "SPEC", "--skip-checks")

    # Sent at once: prefill declines it, since less than its margin of 5 s is left.
    conversation = Conversation(deployment)
    conversation.say()
    turn = conversation.say()
    assert turn.text == conversation.plain()
    assert turn.outcome == Outcome.EXPIRED.value

    until("decode has let the blocks go", lambda: kept_turns(deployment) == 0)
    turn = conversation.say()
    assert turn.text == conversation.plain()
    assert turn.outcome == Outcome.EXPIRED.value


def kept_turns(deployment: Deployment) -> float:
    lines = deployment.client.get(f"{deployment.decode_url}/metrics").text.splitlines()
    name = telemetry.ENGINE_PINS.name
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
