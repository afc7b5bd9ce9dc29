"""Further routers in front of the running pair, and conversations through them."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_connector import contract
from pd_connector.secret import lease_key
from pdctl.conversation import user_text
from pdctl.plan import plan
from pdctl.spec import load
from tests.ports import free_ports
from tests.waiting import until

from .conftest import Deployment
from .legs import metric

TOKENS = 16


@dataclass
class RouterProcess:
    """A router of a test's own."""

    process: subprocess.Popen[bytes]
    url: str
    config_path: Path

    @property
    def log(self) -> str:
        return Path(f"{self.config_path}.log").read_text()

    def hang_up(self, **settings: Any) -> None:
        """Change the config file and have it read again."""
        config = json.loads(self.config_path.read_text()) | settings
        self.config_path.write_text(json.dumps(config))
        self.process.send_signal(signal.SIGHUP)


Start = Callable[..., RouterProcess]


@pytest.fixture(scope="module")
def start(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start one more router of the deployment, with other settings."""
    started: list[RouterProcess] = []
    folder = tmp_path_factory.mktemp("routers")

    def start_router(**settings: Any) -> RouterProcess:
        spec = load(deployment.spec_file).spec
        config = plan(spec, deployment.folder).router.config | settings
        config["port"] = free_ports(1)[0]
        path = folder / f"router-{config['port']}.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "pd_router", "--config", str(path)]
        with Path(f"{path}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | {contract.SECRET_FILE_VARIABLE: str(secret(deployment))},
            )
        scheme = "https" if settings.get("tls") else "http"
        router = RouterProcess(process, f"{scheme}://127.0.0.1:{config['port']}", path)
        started.append(router)
        until("the router listens", lambda: listens(router.url))
        return router

    yield start_router
    for router in started:
        router.process.terminate()
        router.process.wait(30)
        assert "Traceback" not in router.log


def secret(deployment: Deployment) -> Path:
    """The file of the deployment's secret, which ``pdctl up`` made."""
    return deployment.folder / "state" / deployment.name / "secret"


def listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


class Chat:
    """A conversation whose every answer is compared with a plain request's."""

    def __init__(self, deployment: Deployment, url: str, **fields: Any) -> None:
        self.deployment, self.url, self.fields = deployment, url, fields
        self.client = deployment.client
        self.seed = uuid.uuid4().hex
        self.headers: dict[str, str] = {}
        self.messages: list[dict[str, str]] = []

    def say(self, characters: int = 400, **headers: str) -> httpx.Response:
        text = user_text(f"{self.seed}-{len(self.messages)}", characters)
        self.messages.append({"role": "user", "content": text})
        body = {
            "model": "canary",
            "messages": self.messages,
            "max_tokens": TOKENS,
            "temperature": 0,
            "seed": 0,
            **self.fields,
        }
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.client.post(
            f"{self.url}/v1/chat/completions", json=body, headers=self.headers | named
        )
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]["content"]
        assert said == self.deployment.plain(self.messages, TOKENS)
        self.messages.append({"role": "assistant", "content": said})
        return answer

    def copy(self) -> "Chat":
        other = Chat(self.deployment, self.url, **self.fields)
        other.client = self.client
        other.messages = list(self.messages)
        other.headers = dict(self.headers)
        return other


def outcome(answer: httpx.Response) -> str:
    return answer.headers[contract.HEADER_REUSE]


def read(answer: httpx.Response) -> int:
    return int(answer.headers[contract.HEADER_TOKENS_READ])


def pins(deployment: Deployment) -> set[str]:
    """Finished turns that decode keeps. Those of before end meanwhile, each at its own time."""
    return {turn["id"] for turn in leases(deployment)["turns"]}


def leases(deployment: Deployment) -> dict[str, Any]:
    """What decode tells of the turns that it keeps."""
    key = lease_key(secret(deployment).read_bytes().strip())
    answer = deployment.client.get(
        f"{deployment.decode_url}{contract.ENGINE_LEASES_PATH}",
        headers={contract.LEASE_KEY_HEADER: key},
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def idle(deployment: Deployment) -> bool:
    """Whether neither engine has a request, running or waiting."""
    return all(
        metric(deployment, url, name) == 0
        for url in (deployment.prefill_url, deployment.decode_url)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
    )
