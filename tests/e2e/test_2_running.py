"""The router while it runs: reload, drain, release, clients that leave, each in the midst of real
work."""

import contextlib
import json
import signal
import socket
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from pd_connector import contract
from pd_connector.contract import Outcome
from pdctl.conversation import user_text
from tests.waiting import until

from .conftest import Deployment
from .legs import metric
from .routers import Chat, RouterProcess, Start, idle, outcome, pins

LONG = 160
"""Tokens of an answer that is still being made when something happens."""


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.pdctl("up", "SPEC", "--bidir", "on")


class Stream:
    """A long answer under way."""

    def __init__(self, deployment: Deployment, chat: Chat, response: httpx.Response) -> None:
        self.deployment, self.chat = deployment, chat
        self._lines = response.iter_lines()
        self.text = ""
        while not self.text:
            self._take(next(self._lines))

    def _take(self, line: str) -> bool:
        if not line.startswith("data: {"):
            return line == "data: [DONE]"
        (choice,) = json.loads(line[6:])["choices"]
        self.text += choice["delta"].get("content") or ""
        return False

    def under_way(self) -> bool:
        return metric(self.deployment, self.deployment.decode_url, "vllm:num_requests_running") > 0

    def finish(self) -> None:
        """The rest; it must be whole and right, and becomes the conversation's last answer."""
        assert [self._take(line) for line in self._lines if line][-1]
        assert self.text == self.deployment.plain(self.chat.messages, LONG)
        self.chat.messages.append({"role": "assistant", "content": self.text})


@contextlib.contextmanager
def streaming(deployment: Deployment, chat: Chat) -> Iterator[Stream]:
    """The next turn of a conversation, whose answer has begun."""
    chat.messages.append({"role": "user", "content": user_text(uuid.uuid4().hex, 300)})
    body = {
        "model": "canary",
        "messages": chat.messages,
        "max_tokens": LONG,
        "temperature": 0,
        "stream": True,
        **chat.fields,
    }
    with deployment.client.stream("POST", f"{chat.url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        yield Stream(deployment, chat, response)


def connects(router: RouterProcess) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", urlsplit(router.url).port)) == 0


def legs_of(router: RouterProcess) -> dict[str, Any]:
    config = json.loads(router.config_path.read_text())
    return {role: config[role] for role in ("prefill", "decode")}


def test_sigterm_lets_a_stream_end(deployment: Deployment, start: Start) -> None:
    router = start()
    with streaming(deployment, Chat(deployment, router.url)) as stream:
        router.process.send_signal(signal.SIGTERM)
        until("the router listens no more", lambda: not connects(router))
        assert stream.under_way()
        stream.finish()
    assert router.process.wait(30) == 0
    assert "cut off" not in router.log


def test_a_leg_more_changes_nothing_for_a_stream(deployment: Deployment, start: Start) -> None:
    router = start()
    chat = Chat(deployment, router.url, conversation_id="more")
    with streaming(deployment, chat) as stream:
        decode = legs_of(router)["decode"]
        absent = decode["decode-0"] | {"url": "http://127.0.0.1:1"}
        router.hang_up(decode=decode | {"decode-1": absent})
        until("the leg is there", lambda: "reloaded: " in router.log)
        assert stream.under_way()
        stream.finish()
    assert outcome(chat.say(50)) == Outcome.HIT.value


def test_a_stream_outlives_its_leg(deployment: Deployment, start: Start) -> None:
    """Both legs are there under other names: to the router they are others."""
    router = start()
    before = pins(deployment)
    chat = Chat(deployment, router.url, conversation_id="renamed")
    with streaming(deployment, chat) as stream:
        legs = legs_of(router)
        renamed = {role: {f"{role}-b": legs[role][f"{role}-0"]} for role in legs}
        router.hang_up(**renamed)
        until("the legs are others", lambda: "reloaded: prefill-b, decode-b" in router.log)
        assert stream.under_way()
        stream.finish()
    until("decode keeps nothing of it", lambda: pins(deployment) <= before)
    assert outcome(chat.say(50)) == Outcome.MISS.value
    assert outcome(chat.say(50)) == Outcome.HIT.value


def test_a_draining_leg_ends_what_it_has(deployment: Deployment, start: Start) -> None:
    router = start()
    chat = Chat(deployment, router.url, conversation_id="drained")
    legs = f"{router.url}{contract.ADMIN_PATH}/legs"
    with streaming(deployment, chat) as stream:
        drained = deployment.client.post(f"{legs}/decode-0/drain").json()
        assert (drained["draining"], drained["requests_in_flight"]) == (True, 1)
        body = {"model": "canary", "messages": [{"role": "user", "content": "x"}]}
        away = deployment.client.post(f"{router.url}/v1/chat/completions", json=body)
        assert (away.status_code, away.headers["retry-after"]) == (503, "2")
        assert "decode-0" in away.json()["error"]["message"]
        assert stream.under_way()
        stream.finish()
    assert deployment.client.post(f"{legs}/decode-0/undrain").json()["draining"] is False
    assert outcome(chat.say(50)) == Outcome.HIT.value


def test_a_released_conversation_is_free_and_starts_anew(
    deployment: Deployment, start: Start
) -> None:
    router = start()
    before = pins(deployment)
    chat = Chat(deployment, router.url, conversation_id="released")
    chat.say()
    assert len(pins(deployment) - before) == 1
    admin = f"{router.url}{contract.ADMIN_PATH}/conversations"
    (held,) = deployment.client.get(admin).json()["conversations"]
    assert (held["leg"], held["usable"]) == ("decode-0", True)
    assert deployment.client.delete(f"{admin}/{held['id'][:12]}").json() == {"released": 1}
    until("decode has let it go", lambda: pins(deployment) <= before)
    assert outcome(chat.say(50)) == Outcome.MISS.value
    assert outcome(chat.say(50)) == Outcome.HIT.value


def test_what_a_client_gets_wrong_costs_no_handle(deployment: Deployment, start: Start) -> None:
    router = start()
    chats = [Chat(deployment, router.url, conversation_id=f"wrong-{n}") for n in range(3)]
    for chat in chats:
        chat.say()
        messages = [*chat.messages, {"role": "user", "content": "and?"}]
        body = {"model": "canary", "messages": messages, "temperature": "hot", **chat.fields}
        refused = deployment.client.post(f"{router.url}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "temperature" in refused.json()["error"]["message"]
    assert [outcome(chat.say(50)) for chat in chats] == [Outcome.HIT.value] * 3


def blocks(deployment: Deployment, url: str) -> float:
    """Share of an engine's blocks that are in use."""
    return metric(deployment, url, "vllm:kv_cache_usage_perc")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["prefill", "readback", "decode"])
def test_a_client_that_leaves_leaves_nothing(
    deployment: Deployment, start: Start, phase: str, stream: bool
) -> None:
    router = start()
    prefill, decode = deployment.prefill_url, deployment.decode_url
    until("the engines are idle", lambda: idle(deployment))
    before, used = pins(deployment), blocks(deployment, decode)
    chat = Chat(deployment, router.url, conversation_id="leaves")
    if phase == "readback":
        chat.say()
        assert len(pins(deployment) - before) == 1
    text = user_text(uuid.uuid4().hex, 300 if phase == "decode" else 6000)
    body = {
        "model": "canary",
        "messages": [*chat.messages, {"role": "user", "content": text}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": stream,
        **chat.fields,
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    busy = decode if phase == "decode" else prefill
    with socket.create_connection(("127.0.0.1", urlsplit(router.url).port or 0)) as client:
        client.sendall(head.encode() + raw)
        running = "vllm:num_requests_running"
        until("the engine is at it", lambda: metric(deployment, busy, running) == 1)
        if phase != "decode":
            assert metric(deployment, decode, running) == 0
    until("the engines are idle", lambda: idle(deployment))
    until("prefill's blocks are free", lambda: blocks(deployment, prefill) == 0)
    until("decode keeps nothing more", lambda: pins(deployment) <= before)
    until("decode's blocks are free", lambda: blocks(deployment, decode) <= used)
    assert outcome(chat.say(50)) == Outcome.MISS.value
