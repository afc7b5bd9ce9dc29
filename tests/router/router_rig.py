"""A router process between fake engines, and a client to talk to it."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ports import free_ports

from fake_engine import FakeEngine

DEADLINE = 60.0

both = pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
"""With the router's native part and without: what streams do must not depend on it."""


def wait_for(condition: Callable[[], Any], what: str, pause: float = 0.01) -> Any:
    """Poll until the condition holds; ``pause`` is 0 for what takes microseconds."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(pause)
    raise AssertionError(f"never came about: {what}")


def free_port(host: str = "127.0.0.1") -> int:
    if host == "127.0.0.1":
        return free_ports(1)[0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: httpx.Headers
    raw: bytes

    @property
    def outcome(self) -> str:
        return self.headers["x-pd-reuse"]

    @property
    def tokens_read(self) -> int:
        return int(self.headers["x-pd-tokens-read"])

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def chunks(self) -> list[Any]:
        """The stream's JSON events; it must have ended with [DONE]."""
        data = [line[6:] for line in self.raw.split(b"\n") if line.startswith(b"data: ")]
        assert data[-1] == b"[DONE]", self.raw
        return [json.loads(item) for item in data[:-1]]

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message, as an OpenAI client would send it back."""
        if b'"chat.completion"' in self.raw:
            return dict(self.json["choices"][0]["message"])
        content, calls = "", []
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                content += choice["delta"].get("content") or ""
                for part in choice["delta"].get("tool_calls") or []:
                    if part.get("id"):
                        calls.append({k: v for k, v in part.items() if k != "index"})
                    else:
                        calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    @property
    def text(self) -> str:
        if b"data: " in self.raw:
            return "".join(c["text"] for chunk in self.chunks for c in chunk["choices"])
        return str(self.json["choices"][0]["text"])


@dataclass
class Router:
    """A running router and the engines behind it."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path
    config_path: Path
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=DEADLINE))

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.http.post(self.url + path, content=content, headers=named)
        self.check_secrets(answer.content + repr(answer.headers).encode())
        return Answer(answer.status_code, answer.headers, answer.content)

    def check_secrets(self, seen: bytes) -> None:
        """No client byte may tell of engines and handles."""
        for engine in self.engines:
            leaked = [secret for secret in engine.secrets if secret.encode() in seen]
            assert leaked == [], seen

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, added up over the labels that are not given."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        lines = re.findall(
            rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", self.get("/metrics").text, re.M
        )
        return sum(float(value) for text, value in lines if wanted <= set(text.split(",")))

    def peak_memory(self) -> int:
        """The most bytes that the process has had in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def engines(self) -> list[FakeEngine]:
        return [*self.prefill, *self.decode]

    def hang_up(self, **settings: Any) -> None:
        """Change the config file and have it read again."""
        config = json.loads(self.config_path.read_text()) | settings
        self.config_path.write_text(json.dumps(config))
        self.process.send_signal(signal.SIGHUP)

    def wait_released(self, turns: set[str]) -> None:
        """Wait until decode has been told to release these turns."""

        def told() -> bool:
            return turns <= {turn for engine in self.decode for turn in engine.released_turns}

        wait_for(told, f"{turns} are released")

    def reset(self) -> None:
        for engine in self.engines:
            engine.reset()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.http.close()
        return self.process.returncode


StartRouter = Callable[..., Router]
numbers = itertools.count()


def launch(
    folder: Path,
    prefill: list[FakeEngine],
    decode: list[FakeEngine],
    host: str = "127.0.0.1",
    http: httpx.Client | None = None,
    prefix_caching: bool = True,
    leg_bidirectional: bool = True,
    python: Sequence[str] = ("-m", "pd_router"),
    **settings: Any,
) -> Router:
    """A router process; ``settings`` are keys of its config file, ``http`` talks to it,
    ``python`` is what Python runs."""
    port = free_port(host)
    config = {"name": "router-0", "host": host, "port": port, "route": "readback"} | settings
    for role, engines in (("prefill", prefill), ("decode", decode)):
        leg = {"prefix_caching": role == "decode" and prefix_caching}
        leg["bidirectional"] = leg_bidirectional or role == "decode"
        config[role] = {f"{role}-{n}": leg | {"url": e.url} for n, e in enumerate(engines)}
    number = next(numbers)
    config_path, log_path = folder / f"router-{number}.json", folder / f"router-{number}.log"
    config_path.write_text(json.dumps(config))
    command = [sys.executable, *python, "--config", str(config_path)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    address = f"[{host}]" if ":" in host else host
    scheme = "https" if settings.get("tls") else "http"
    router = Router(process, f"{scheme}://{address}:{port}", log_path, config_path, prefill, decode)
    router.http = http or router.http

    def listening() -> bool:
        assert process.poll() is None, log_path.read_text()
        with contextlib.suppress(httpx.ConnectError):
            return router.get("/metrics").status_code == 200
        return False

    try:
        wait_for(listening, "the router listens")
    except BaseException:
        router.stop()
        raise
    return router


@dataclass
class Chat:
    """A client's conversation: it appends every answer to its history."""

    router: Router
    id: str | None
    stream: bool = True
    key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def body(self, text: str, **fields: Any) -> dict[str, Any]:
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": "fake", "messages": messages, "stream": self.stream}
        if self.id is not None:
            body["conversation_id"] = self.id
        return body | self.fields | fields

    def say(self, text: str, **fields: Any) -> Answer:
        body = self.body(text, **fields)
        headers = {"authorization": self.key} if self.key else {}
        answer = self.router.post(body, **headers)
        if answer.status == 200:
            self.messages = [*body["messages"], answer.message]
        return answer
