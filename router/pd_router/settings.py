"""What the command line says, checked, in one immutable place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Connector = Literal["pdctl", "stock"]


@dataclass(frozen=True, slots=True)
class Settings:
    """One router process. Durations are seconds, sizes bytes."""

    name: str
    host: str
    port: int
    prefill: Mapping[str, str]
    """Leg name to base URL."""
    decode: Mapping[str, str]
    handle_ttl: float
    decode_ttl: float
    connector: Connector
    bidirectional: bool
    conversation_headers: tuple[str, ...]
    prefill_timeout: float
    """Bound of a prefill that carries no handle."""
    readback_timeout: float
    """Bound of a prefill that carries a handle."""
    stream_idle_timeout: float
    """Longest silence of decode within a stream, its first event included."""
    answer_timeout: float
    """Bound of decode's answer when it is not streamed."""
    max_handles: int
    max_body: int
    log_level: str
