"""What engines count and say of themselves, per leg, as the benchmark keeps it."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pd_connector import contract
from pdctl.errors import PdctlError

Counters = dict[str, float]
"""One leg's: the names below; missing ones were not on its /metrics."""

COMPUTED, LOCAL, EXTERNAL = "computed_tokens", "local_tokens", "external_tokens"
_BY_SOURCE = {
    contract.SOURCE_LOCAL_COMPUTE: COMPUTED,
    contract.SOURCE_LOCAL_CACHE: LOCAL,
    contract.SOURCE_EXTERNAL_KV: EXTERNAL,
}
_PLAIN = {
    contract.ENGINE_NIXL_BYTES: "nixl_bytes",
    contract.ENGINE_NIXL_TRANSFERS: "nixl_transfers",
    contract.ENGINE_NIXL_SECONDS: "nixl_seconds",
    contract.ENGINE_NIXL_POST_SECONDS: "nixl_post_seconds",
    contract.ENGINE_NIXL_DESCRIPTORS: "nixl_descriptors",
    contract.ENGINE_NIXL_FAILED: "nixl_failed",
    contract.ENGINE_NIXL_EXPIRED: "nixl_expired",
    contract.ENGINE_PREEMPTIONS: "preemptions",
    contract.ENGINE_TTFT_SECONDS: "ttft_seconds",
    contract.ENGINE_REQUEST_SECONDS: "request_seconds",
    contract.ENGINE_KV_USAGE: "kv_usage",
}
_WANTED = re.compile(
    "|".join(
        re.escape(name)
        for name in (contract.ENGINE_PROMPT_TOKENS_BY_SOURCE, contract.ENGINE_CACHE_INFO, *_PLAIN)
    )
)
_SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class EngineLeg:
    name: str
    role: str
    url: str


async def read_counters(client: httpx.AsyncClient, leg: EngineLeg) -> Counters:
    """One leg's counters now, and its KV cache's size in tokens (``kv_tokens``).

    Raises:
        PdctlError: it does not answer, or not with vLLM's metrics.
    """
    try:
        response = await client.get(f"{leg.url}/metrics", timeout=30.0)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise PdctlError(f"{leg.url}/metrics: {error or type(error).__name__}") from None
    counters = counters_of(response.text)
    if counters is None:
        raise PdctlError(f"{leg.url}/metrics has no vLLM metrics")
    return counters


def counters_of(text: str) -> Counters | None:
    """Counters in a text of Prometheus metrics; None when it is no vLLM engine's."""
    if "vllm:" not in text:
        return None
    # Parsing all of it would take longer than a short turn.
    wanted = [line for line in text.split("\n") if _WANTED.match(line)]
    counters: Counters = {}
    for family in text_string_to_metric_families("\n".join(wanted) + "\n"):
        for sample in family.samples:
            name: str | None = _PLAIN.get(sample.name)
            if sample.name == contract.ENGINE_PROMPT_TOKENS_BY_SOURCE:
                name = _BY_SOURCE.get(sample.labels.get("source", ""))
            elif sample.name == contract.ENGINE_CACHE_INFO:
                _add_cache_info(counters, sample.labels)
                continue
            if name:
                counters[name] = counters.get(name, 0.0) + sample.value
    return counters


def _add_cache_info(counters: Counters, labels: dict[str, str]) -> None:
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if blocks.isdigit() and size.isdigit():
        counters["block_size"] = int(size)
        counters["kv_tokens"] = counters.get("kv_tokens", 0) + int(blocks) * int(size)


def gain(before: Counters, after: Counters, name: str) -> float:
    """How much a counter grew. vLLM shows some only after their first event."""
    return after.get(name, 0.0) - before.get(name, 0.0)


async def all_counters(
    client: httpx.AsyncClient, legs: list[EngineLeg]
) -> dict[str, Counters] | None:
    """By leg; None when no engine is known."""
    if not legs:
        return None
    read = await asyncio.gather(*(read_counters(client, leg) for leg in legs))
    return {leg.name: counters for leg, counters in zip(legs, read, strict=True)}


async def settled_counters(
    client: httpx.AsyncClient,
    legs: list[EngineLeg],
    enough: Callable[[dict[str, Counters]], bool],
) -> dict[str, Counters] | None:
    """Counters once they have caught up, or as they are after ten seconds.

    Engines count just after they have answered.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        now = await all_counters(client, legs)
        if now is None or enough(now) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.02)


_ACTIVE = re.compile(
    re.escape(contract.LOG_CONNECTOR_ACTIVE) + r": role=(\S+) bidirectional=(True|False) "
    r"kv_recompute_threshold=(\d+) decoder_kv_blocks_ttl=(\S+) kv_load_failure_policy=(\S+) "
    r"readback=(on|off)"
)
_STOCK_BIDIRECTIONAL = re.compile(
    r"Bidirectional KV transfer is enabled and the kv recompute threshold is set to (\d+) tokens"
)
_CROSS_LAYER = re.compile(r"(?i)cross[- _]layers?")


def settings_in_log(text: str) -> dict[str, Any]:
    """What a leg's log says of how its connector was started; empty when it says nothing."""
    if found := _ACTIVE.search(text):
        role, bidirectional, threshold, ttl, policy, readback = found.groups()
        return {
            "source": "log",
            "role": role,
            "bidirectional": bidirectional == "True",
            "recompute_threshold": int(threshold),
            "decode_ttl": ttl,
            "load_failure_policy": policy,
            "readback": readback,
        }
    if found := _STOCK_BIDIRECTIONAL.search(text):
        return {
            "source": "log",
            "bidirectional": True,
            "recompute_threshold": int(found.group(1)),
        }
    return {}


async def settings_of(client: httpx.AsyncClient, leg: EngineLeg, log: str | None) -> dict[str, Any]:
    """A leg's effective settings: its own settings endpoint, else its log."""
    try:
        response = await client.get(f"{leg.url}{contract.ENGINE_SETTINGS_PATH}", timeout=10.0)
        if response.status_code == 200:
            told = response.json()
            if isinstance(told, dict):
                flat = _flat_settings(told)
                if flat:
                    return {"source": "endpoint", **flat}
    except (httpx.HTTPError, ValueError):
        pass
    return settings_in_log(log) if log else {}


def _flat_settings(told: dict[str, Any]) -> dict[str, Any]:
    """The settings that both legs must share, wherever the endpoint nests them."""
    names = {
        "bidirectional": "bidirectional",
        "bidirectional_kv_xfer": "bidirectional",
        "recompute_threshold": "recompute_threshold",
        "kv_recompute_threshold": "recompute_threshold",
        "decode_ttl": "decode_ttl",
        "decoder_kv_blocks_ttl": "decode_ttl",
        "block_size": "block_size",
        "kv_cache_dtype": "kv_cache_dtype",
        "max_model_len": "max_model_len",
        "cross_layer_blocks": "cross_layer_blocks",
    }
    flat: dict[str, Any] = {}

    def walk(value: Any) -> None:
        if not isinstance(value, dict):
            return
        for key, inner in value.items():
            if key in names and not isinstance(inner, dict | list):
                flat.setdefault(names[key], inner)
            else:
                walk(inner)

    walk(told)
    return flat if "bidirectional" in flat else {}
