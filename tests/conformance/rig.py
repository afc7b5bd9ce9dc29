"""A router under test between strict fake engines, and a client to talk to it."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fake_engine import FakeEngine

SECONDS = 30.0
NAMES = ("X-Conversation-ID", "X-Session-ID", "X-Correlation-ID")
"""Headers by which routers know a conversation; the kit sends them all."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def events(self) -> list[bytes]:
        """Data of the stream's events, ``[DONE]`` included."""
        lines = self.raw.replace(b"\r\n", b"\n").split(b"\n")
        return [line[6:] for line in lines if line.startswith(b"data: ")]

    @property
    def text(self) -> str:
        """The assistant's words."""
        if b"data: " not in self.raw:
            choice = json.loads(self.raw)["choices"][0]
            return str(choice["message"]["content"] if "message" in choice else choice["text"])
        chunks = [json.loads(event) for event in self.events if event != b"[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
        )


@dataclass
class Rig:
    """The router's URL and the engines that it was told of."""

    url: str
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(timeout=SECONDS, trust_env=False)
    )

    @property
    def engines(self) -> list[FakeEngine]:
        return [*self.prefill, *self.decode]

    def reset(self) -> None:
        """Engines as at the start; a conversation of an earlier test is never continued."""
        for engine in self.engines:
            engine.reset()

    @property
    def readbacks(self) -> int:
        """Handles that prefill read (D->P)."""
        return sum(engine.reads for engine in self.prefill)

    @property
    def handovers(self) -> int:
        """Handles that decode read (P->D)."""
        return sum(engine.reads for engine in self.decode)

    @property
    def violations(self) -> list[str]:
        return [each for engine in self.engines for each in engine.violations]

    @property
    def secrets(self) -> set[str]:
        return {secret for engine in self.engines for secret in engine.secrets}

    def post(
        self, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str
    ) -> Answer:
        response = self.client.post(self.url + path, json=body, headers=headers)
        return Answer(response.status_code, dict(response.headers), response.content)

    def chat(self, **how: Any) -> "Chat":
        return Chat(self, **how)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"never came about: {what}"
            time.sleep(0.02)


@dataclass
class Chat:
    """A client's conversation: it appends every answer to its history."""

    rig: Rig
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    stream: bool = True
    authorization: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.messages:
            words = f"You help with {uuid.uuid4().hex}. " + "Mind the blocks. " * 12
            self.messages = [{"role": "system", "content": words}]

    @property
    def headers(self) -> dict[str, str]:
        headers = dict.fromkeys(NAMES, self.id)
        if self.authorization:
            headers["Authorization"] = self.authorization
        return headers

    def body(self, text: str = "Go on.", **fields: Any) -> dict[str, Any]:
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": "fake", "messages": messages, "stream": self.stream, "max_tokens": 64}
        return body | fields

    def say(self, text: str = "Go on.", **fields: Any) -> Answer:
        """One turn; with status 200 its answer joins the history."""
        body = self.body(text, **fields)
        answer = self.rig.post(body, **self.headers)
        if answer.status == 200:
            reply = {"role": "assistant", "content": answer.text}
            self.messages = [*body["messages"], reply]
        return answer

    def copy(self) -> "Chat":
        """The same conversation in other hands."""
        return Chat(self.rig, self.id, self.stream, self.authorization, list(self.messages))
