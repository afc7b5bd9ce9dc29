"""What engines and router count: their Prometheus metrics, added up over the legs of a role."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pd_connector import contract
from pdctl.errors import PdctlError

T = TypeVar("T")

_SETTLE_SECONDS = 15.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class EngineCounters:
    """Totals since the engines' start. None of them is ever guessed: a missing metric is 0 only
    for engines that do answer, since vLLM shows some counters after their first event."""

    computed_tokens: int
    cached_tokens: int
    external_tokens: int
    nixl_bytes: int
    nixl_transfers: int

    def __sub__(self, other: "EngineCounters") -> "EngineCounters":
        return EngineCounters(
            **{name: value - getattr(other, name) for name, value in vars(self).items()}
        )

    @property
    def prompt_tokens(self) -> int:
        return self.computed_tokens + self.cached_tokens + self.external_tokens


NOTHING = EngineCounters(0, 0, 0, 0, 0)


def engine_counters(client: httpx.Client, urls: Iterable[str]) -> EngineCounters:
    """Added up over engines.

    Raises:
        PdctlError: one of them does not answer, or answers no vLLM metrics.
    """
    total: dict[str, float] = {}
    for url in urls:
        samples = _samples(client, url)
        if not any(name.startswith("vllm:") for name, _ in samples):
            raise PdctlError(f"{url}/metrics has no vLLM metrics")
        for (name, source), value in samples.items():
            key = f"{name}/{source}" if name == contract.ENGINE_PROMPT_TOKENS_BY_SOURCE else name
            total[key] = total.get(key, 0.0) + value
    by_source = contract.ENGINE_PROMPT_TOKENS_BY_SOURCE
    return EngineCounters(
        computed_tokens=int(total.get(f"{by_source}/{contract.SOURCE_LOCAL_COMPUTE}", 0)),
        cached_tokens=int(total.get(f"{by_source}/{contract.SOURCE_LOCAL_CACHE}", 0)),
        external_tokens=int(total.get(f"{by_source}/{contract.SOURCE_EXTERNAL_KV}", 0)),
        nixl_bytes=int(total.get(contract.ENGINE_NIXL_BYTES, 0)),
        nixl_transfers=int(total.get(contract.ENGINE_NIXL_TRANSFERS, 0)),
    )


def router_counter(client: httpx.Client, url: str, name: str) -> int:
    """One counter of the router, added up over its labels.

    Raises:
        PdctlError: the router does not answer or does not have the counter.
    """
    values = [value for (sample, _), value in _samples(client, url).items() if sample == name]
    if not values:
        raise PdctlError(f"{url}/metrics has no {name}: is this pdctl's router?")
    return int(sum(values))


def settled(read: Callable[[], T], enough: Callable[[T], bool]) -> T:
    """Read until it has caught up with an answer, or give up and return what there is.

    Engines and router count just after they have answered.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while not enough(value := read()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return value


def _samples(client: httpx.Client, url: str) -> dict[tuple[str, str], float]:
    """By sample name and ``source`` label; other labels are added up."""
    try:
        response = client.get(f"{url}/metrics", timeout=10.0)
        response.raise_for_status()
        families = list(text_string_to_metric_families(response.text))
    except httpx.HTTPError as error:
        raise PdctlError(f"{url}/metrics: {error or type(error).__name__}") from None
    except ValueError as error:
        raise PdctlError(f"{url}/metrics is not Prometheus text: {error}") from None
    samples: dict[tuple[str, str], float] = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, sample.labels.get("source", ""))
            samples[key] = samples.get(key, 0.0) + sample.value
    return samples
