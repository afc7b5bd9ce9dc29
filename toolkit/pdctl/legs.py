"""The processes of a deployment, as they are planned."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

GRACE_SECONDS = 20.0
"""For an engine to end by itself, before it is killed."""
_AFTER_DRAIN_SECONDS = 10.0
"""For a router: it tells the clients of cut-off streams, and decode what need not be kept."""

NONCE = "{nonce}"
"""Stands in an engine id for the part that a start fills in."""


@dataclass(frozen=True)
class Variable:
    """An environment variable and why it is set."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Flag:
    """Words of the command line and why they are there."""

    words: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Leg:
    """One process of a deployment.

    ``checked`` is what the start script compares with the node (:mod:`pd_connector.check`).
    ``listens`` are addresses and ports: HTTP first, then the side channel's. ``kv_config`` is
    vLLM's kv-transfer-config, empty for the router; ``config`` is the router's config file, empty
    for an engine.
    """

    name: str
    role: Literal["prefill", "decode", "router"]
    deployment: str
    host: str
    bind: str
    port: int
    listens: tuple[tuple[str, int], ...]
    venv: str | None
    checked: tuple[str, ...]
    cpus: str
    python: str
    command: tuple[str, ...]
    env: tuple[Variable, ...]
    flags: tuple[Flag, ...]
    kv_config: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    tls: bool = False

    @property
    def url(self) -> str:
        """Base URL at which others reach it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @property
    def grace(self) -> float:
        """Seconds to end by itself, before it is killed."""
        if self.role != "router":
            return GRACE_SECONDS
        return float(self.config["drain_timeout"]) + _AFTER_DRAIN_SECONDS


@dataclass(frozen=True)
class Deployment:
    name: str
    bidirectional: bool
    served_name: str
    engines: tuple[Leg, ...]
    router: Leg

    @property
    def legs(self) -> tuple[Leg, ...]:
        """In the order they are started: engines, then the router."""
        return (*self.engines, self.router)

    def role(self, role: str) -> tuple[Leg, ...]:
        return tuple(leg for leg in self.legs if leg.role == role)


def kv_config_json(leg: Leg) -> str:
    """The kv-transfer-config as one line of JSON."""
    return json.dumps(leg.kv_config, separators=(",", ":"))
