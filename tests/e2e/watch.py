"""Real Prometheus and Alertmanager that watch the pair, and turns for them to see."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from pd_connector import contract
from pdctl.conversation import user_text
from pdctl.observe.prometheus import Prometheus
from tests.ports import free_ports
from tests.programs import program
from tests.waiting import until as until_within

from .conftest import Deployment

ANSWER_TOKENS = 16
ALERT_WINDOW = 4


def until(what: str, holds: Callable[[], Any], seconds: float = 150.0) -> None:
    """Engines start and stop, and blocks live half a minute."""
    until_within(what, holds, seconds)


class Watch:
    """The deployment's spec names them, with short times; ``pdctl observe up`` starts them."""

    def __init__(self, deployment: Deployment, **stack: Any) -> None:
        for name in ("prometheus", "prometheus-alertmanager"):
            program(name)
        ports = free_ports(3)
        deployment.spec["observability"]["stack"] |= {
            "prometheus_port": ports[0],
            "alertmanager_port": ports[1],
            "grafana_port": ports[2],
            "scrape_interval": "1s",
            "alert_window": f"{ALERT_WINDOW}s",
            **stack,
        }
        deployment.write()
        self.deployment = deployment
        self.prometheus = Prometheus(f"http://127.0.0.1:{ports[0]}")
        self.alertmanager = f"http://127.0.0.1:{ports[1]}"

    def alerts(self) -> list[dict[str, Any]]:
        """As Alertmanager has them."""
        url = f"{self.alertmanager}/api/v2/alerts"
        found: list[dict[str, Any]] = self.deployment.client.get(url).json()
        return found

    def firing(self, name: str) -> dict[str, Any] | None:
        return next((each for each in self.alerts() if each["labels"]["alertname"] == name), None)

    def playbook(self, name: str) -> str:
        """The page that a firing alert's runbook_url leads to."""
        alert = self.firing(name)
        assert alert is not None
        answer = self.deployment.client.get(alert["annotations"]["runbook_url"])
        assert answer.status_code == 200
        return answer.text


@dataclass(frozen=True)
class Sample:
    """One turn as its client saw it."""

    outcome: str
    prompt_tokens: int
    tokens_read: int
    read_bytes: int
    ttft: float


@dataclass
class Load:
    """Conversations through the router, and the record of their turns."""

    router: str
    samples: list[Sample] = field(default_factory=list)
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=300, trust_env=False))

    def turn(self, talk: list[dict[str, str]], name: str, **headers: str) -> Sample:
        """The next turn of a conversation; its answer joins it."""
        talk.append({"role": "user", "content": user_text(f"{name}-{len(talk)}", 400)})
        body = {
            "model": Deployment.model,
            "messages": talk,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            contract.CONVERSATION_ID: name,
        }
        text, seconds, began = "", math.nan, time.perf_counter()
        url = f"{self.router}/v1/chat/completions"
        with self.client.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if math.isnan(seconds):
                    seconds = time.perf_counter() - began
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
        talk.append({"role": "assistant", "content": text})
        told = answer.headers
        sample = Sample(
            told[contract.HEADER_REUSE],
            int(told[contract.HEADER_PROMPT_TOKENS]),
            int(told.get(contract.HEADER_TOKENS_READ, 0)),
            int(told.get(contract.HEADER_READ_BYTES, 0)),
            seconds,
        )
        self.samples.append(sample)
        return sample
