"""A real prefill leg, decode leg and router on this machine, driven through the pdctl command."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pd_connector import contract
from pd_connector.check import installed
from pdctl.conversation import Messages, Turn, plain_answer, stream_turn, user_text
from pdctl.counters import EngineCounters, engine_counters, settled
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
CANARY = ROOT / ".cache/canary"
ANSWER_TOKENS = 32
PDCTL = Path(sys.executable).with_name("pdctl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


class Deployment:
    """A deployment of its own name, ports and state folder."""

    model = "canary"

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = f"e2e-{uuid.uuid4().hex[:6]}"
        self.spec_file = folder / "spec.yaml"
        prefill, decode, router, side_p, side_d = free_ports(5)
        self.prefill_url = f"http://127.0.0.1:{prefill}"
        self.decode_url = f"http://127.0.0.1:{decode}"
        self.router_url = f"http://127.0.0.1:{router}"
        self.spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/laptop.yaml").read_text())
        self.spec["name"] = self.name
        self.spec["model"]["id"] = str(CANARY)
        self.spec["engine"] |= {"venv": None, "python": sys.executable}
        # Some flags depend on it: the same tests run on every engine that is installed.
        self.spec["engine"] |= {name: installed(name) for name in ("vllm", "nixl")}
        self.spec["prefill"]["legs"][0] |= {"port": prefill, "side_channel_port": side_p}
        self.spec["decode"]["legs"][0] |= {"port": decode, "side_channel_port": side_d}
        self.spec["router"]["port"] = router
        # Decode keeps a core busy while it holds blocks: not longer than the tests need.
        self.spec["kv_transfer"]["decode_ttl"] = "300s"
        self.spec["router"]["handle_ttl"] = "290s"
        # What the tests look at; the router's own choice would be to append short turns.
        self.spec["router"]["route"] = "readback"
        self.client = httpx.Client(timeout=300, trust_env=False)
        self.write()

    def write(self) -> None:
        self.spec_file.write_text(yaml.safe_dump(self.spec, sort_keys=False))

    def pdctl(self, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run pdctl with these words; where a word is SPEC, the spec file."""
        if words[0] == "up":
            words += ("--timeout", "240")
        command = [str(PDCTL), *(str(self.spec_file) if w == "SPEC" else w for w in words)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=500,
            env=os.environ | {"PDCTL_STATE_DIR": str(self.folder / "state")},
            check=False,
        )
        if ok and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def status(self) -> dict[str, dict[str, Any]]:
        legs = json.loads(self.pdctl("status", self.name, "--json", ok=False).stdout)["legs"]
        return {leg["name"]: leg for leg in legs}

    def log(self, leg: str) -> str:
        return (self.folder / "state" / self.name / f"{leg}.log").read_text(errors="replace")

    def counters(self) -> EngineCounters:
        return engine_counters(self.client, [self.prefill_url])

    def counted_since(self, before: EngineCounters, prompt_tokens: int) -> EngineCounters:
        """What prefill counted, once it has counted a prompt of this length."""
        return settled(
            lambda: self.counters() - before, lambda gain: gain.prompt_tokens >= prompt_tokens
        )

    def finished_turn(self, prompt: str) -> tuple[str, dict[str, Any]]:
        """A turn's text and decode's handle of it, got from the engines without the router."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        ask = {contract.DO_REMOTE_DECODE: True, contract.DO_REMOTE_PREFILL: False}
        prefilled = self.client.post(
            f"{self.prefill_url}/v1/completions", json=body | {contract.KV_TRANSFER_PARAMS: ask}
        ).json()
        params = prefilled[contract.KV_TRANSFER_PARAMS]
        decoded = self.client.post(
            f"{self.decode_url}/v1/completions",
            json=body | {"max_tokens": 8, contract.KV_TRANSFER_PARAMS: params},
        ).json()
        return prompt + decoded["choices"][0]["text"], decoded[contract.KV_TRANSFER_PARAMS]

    def plain(self, messages: Messages, tokens: int = ANSWER_TOKENS) -> str:
        return plain_answer(self.client, self.prefill_url, self.model, messages, tokens)


class Conversation:
    """A conversation through the router that grows turn by turn."""

    def __init__(self, deployment: Deployment, characters: int = 600):
        self.deployment = deployment
        self.id = uuid.uuid4().hex
        self.characters = characters
        self.messages: Messages = []

    def say(self) -> Turn:
        """The next turn; its answer joins the history."""
        text = user_text(f"{self.id}-{len(self.messages)}", self.characters)
        self.messages.append({"role": "user", "content": text})
        turn = self.send()
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    def send(self) -> Turn:
        """The messages as they are."""
        return stream_turn(
            self.deployment.client,
            self.deployment.router_url,
            self.deployment.model,
            self.messages,
            ANSWER_TOKENS,
            self.id,
        )

    def plain(self) -> str:
        """What one engine alone answers to the history up to the last answer."""
        return self.deployment.plain(self.messages[:-1])


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Not started yet: tests bring it into the state they need with ``pdctl up``."""
    if not (CANARY / "config.json").is_file():
        subprocess.run([str(PDCTL), "canary", str(CANARY)], check=True)
    deployment = Deployment(tmp_path_factory.mktemp("e2e"))
    yield deployment
    deployment.client.close()
    deployment.pdctl("down", deployment.name, "--grace", "10")


from .pair import pair, receiver  # noqa: E402, F401
from .routers import start  # noqa: E402, F401
