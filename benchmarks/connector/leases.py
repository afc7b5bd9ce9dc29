"""200 conversations on a small KV cache: blocks kept for a fixed time against leases.

Fixed: vLLM's own connector; decode keeps every finished turn for its TTL. Leases: pdctl's; a
conversation that ends is released, and above the high-water mark the longest idle turns go. Both
see the same conversations, one pair of engines after the other. A turn that prefill refuses with
its handle (HTTP 500 from vLLM's connector) is repeated without it, as the router does. An engine
that dies ends its arm: the end of its log is shown. Exits 1 when leases preempt, hit less often or
do not get to the end.

usage: python benchmarks/connector/leases.py [--conversations N] [--blocks N] [--ttl S]
       [--at-once N] [--limit S] [--json FILE]
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rig import FRESH, Metrics, Pair, complete, metrics, pair, quantile, tail, text_of

from pd_connector import contract

SAMPLE_SECONDS = 0.5


@dataclass
class Result:
    arm: str
    seconds: float = 0.0
    finished: int = 0
    turns: int = 0
    later_turns: int = 0
    hits: int = 0
    retried: int = 0
    broke: str = ""
    """What ended the arm before its time."""
    preemptions: int = 0
    turn_ms: list[float] = field(default_factory=list, repr=False)
    pinned: list[float] = field(default_factory=list, repr=False)
    usage: list[float] = field(default_factory=list, repr=False)
    ends: dict[str, int] = field(default_factory=dict)


class Kept:
    """The turns that decode keeps for its TTL, as handles tell; for an engine that does not."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._turns: dict[str, tuple[int, float]] = {}

    def add(self, handle: dict[str, Any]) -> None:
        blocks = sum(map(len, handle[contract.REMOTE_BLOCK_IDS]))
        deadline = time.monotonic() + self._ttl
        self._turns[handle[contract.REMOTE_REQUEST_ID]] = (blocks, deadline)

    def read(self, handle: dict[str, Any]) -> None:
        self._turns.pop(handle[contract.REMOTE_REQUEST_ID], None)

    def blocks(self) -> int:
        now = time.monotonic()
        return sum(blocks for blocks, deadline in self._turns.values() if deadline > now)


class Arm:
    def __init__(self, options: argparse.Namespace, engines: Pair, leases: bool) -> None:
        self._options = options
        self._engines = engines
        self._leases = leases
        self._kept = Kept(options.ttl)
        self.result = Result("leases" if leases else f"fixed, {options.ttl} s")
        self._client = httpx.AsyncClient(timeout=None, trust_env=False)
        self._key = engines.key()
        self._stop_at = 0.0
        self._last = Metrics("")

    async def run(self) -> Result:
        waiting: asyncio.Queue[int] = asyncio.Queue()
        for number in range(self._options.conversations):
            waiting.put_nowait(number)
        before = await metrics(self._client, self._engines.decode)
        started = time.monotonic()
        self._stop_at = started + self._options.limit
        sampling = asyncio.create_task(self._sample())
        await asyncio.gather(*(self._talk(waiting) for _ in range(self._options.at_once)))
        self.result.seconds = time.monotonic() - started
        if self.result.broke:
            await asyncio.sleep(2)  # Its log is written.
            print(f"{self.result.broke}; decode's log ends:\n{tail(self._engines.log('decode-0'))}")
        else:
            self._last = await metrics(self._client, self._engines.decode)
        sampling.cancel()
        name = "vllm:num_preemptions_total"
        self.result.preemptions = int(self._last(name) - before(name))
        for why in ("read", "released", "successor", "high_water", "expired"):
            self.result.ends[why] = int(self._last("pd_engine_pins_ended_total", reason=why))
        await self._client.aclose()
        return self.result

    async def _talk(self, waiting: "asyncio.Queue[int]") -> None:
        while not waiting.empty() and time.monotonic() < self._stop_at:
            number = waiting.get_nowait()
            left = self._stop_at - time.monotonic()
            try:
                await asyncio.wait_for(self._conversation(number), left)
            except asyncio.TimeoutError:
                return
            except httpx.TransportError as error:
                self.result.broke = self.result.broke or f"broken off: {error!r}"
                self._stop_at = 0.0
                return
            self.result.finished += 1

    async def _conversation(self, number: int) -> None:
        source = random.Random(number)
        history, handle = "", None
        for turn in range(source.randint(1, 4)):
            history += text_of((number, turn), source.randint(100, 400))
            tokens = source.randint(8, 40)
            history, handle = await self._turn(history, handle, tokens, turn)
            await asyncio.sleep(source.random())
        if self._leases and handle is not None:
            url = f"{self._engines.decode}{contract.ENGINE_LEASES_PATH}"
            order = {"release": [handle[contract.REMOTE_REQUEST_ID]]}
            answer = await self._client.post(url, json=order, headers=self._key)
            answer.raise_for_status()

    async def _turn(
        self, prompt: str, handle: dict[str, Any] | None, tokens: int, number: int
    ) -> tuple[str, dict[str, Any] | None]:
        started = time.monotonic()
        try:
            prefilled = await complete(
                self._client, self._engines.prefill, prompt, 1, handle or FRESH
            )
        except httpx.HTTPStatusError:
            self.result.retried += 1
            prefilled = await complete(self._client, self._engines.prefill, prompt, 1, FRESH)
        params = prefilled[contract.KV_TRANSFER_PARAMS]
        reused = (prefilled["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if handle is not None:
            self._kept.read(handle)
        params.pop(contract.PD_REUSE, None)
        answer = await complete(self._client, self._engines.decode, prompt, tokens, params)
        self.result.turns += 1
        self.result.later_turns += number > 0
        self.result.hits += number > 0 and reused > 0
        self.result.turn_ms.append((time.monotonic() - started) * 1e3)
        kept = answer.get(contract.KV_TRANSFER_PARAMS)
        if kept is not None:
            self._kept.add(kept)
        return prompt + answer["choices"][0]["text"], kept

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            try:
                self._last = seen = await metrics(self._client, self._engines.decode)
            except httpx.TransportError:
                return
            pinned = seen("pd_engine_pinned_blocks") if self._leases else self._kept.blocks()
            self.result.pinned.append(min(1.0, pinned / self._options.blocks))
            self.result.usage.append(seen("vllm:kv_cache_usage_perc"))


def hit_rate(result: Result) -> float:
    return result.hits / max(result.later_turns, 1)


def row(result: Result) -> str:
    rate = 100 * hit_rate(result)
    mean = sum(result.pinned) / max(len(result.pinned), 1)
    most = max(result.pinned, default=0)
    return (
        f"{result.arm:<12} {result.finished:>9} {result.turns:>6} {result.seconds:>7.0f} "
        f"{result.preemptions:>11} {rate:>7.1f}% {mean:>11.0%} {most:>6.0%} "
        f"{max(result.usage, default=0):>6.0%} {quantile(result.turn_ms, 0.5):>8.0f} "
        f"{quantile(result.turn_ms, 0.95):>8.0f} {result.retried:>8}"
        f"{'  ' + result.broke if result.broke else ''}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=64, help="KV blocks of decode (128 tokens)")
    parser.add_argument("--ttl", type=int, default=60, help="seconds decode keeps a turn")
    parser.add_argument("--at-once", type=int, default=8, help="conversations at a time")
    parser.add_argument("--limit", type=float, default=150, help="seconds per arm, at most")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    results = []
    for leases in (False, True):
        kv = {"connector": "pdctl" if leases else "stock", "decode_ttl": f"{options.ttl}s"}
        engine = {"extra_args": {"decode": ["--num-gpu-blocks-override", str(options.blocks)]}}
        router = {"handle_ttl": f"{options.ttl - 1}s"}
        # The least that one prompt may need must fit into the small cache.
        changes = {
            "kv_transfer": kv,
            "engine": engine,
            "router": router,
            "model": {"max_model_len": 2048},
        }
        with pair(changes) as engines:
            print(f"running: {'leases' if leases else 'fixed TTL'}", flush=True)
            results.append(asyncio.run(Arm(options, engines, leases).run()))
            print(row(results[-1]), flush=True)
    print(
        f"{options.conversations} conversations of 1 to 4 turns, {options.at_once} at a time, "
        f"decode with {options.blocks} blocks of 128 tokens\n"
    )
    print(
        "arm           finished  turns seconds preemptions hit rate pinned mean    max  usage "
        "turn p50      p95  retried"
    )
    for result in results:
        print(row(result))
    print("\nleases ended:", ", ".join(f"{why} {n}" for why, n in results[1].ends.items()))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results]))
    fixed, leased = results
    worse = leased.broke or leased.preemptions or leased.finished < options.conversations
    return int(bool(worse) or hit_rate(leased) < hit_rate(fixed))


if __name__ == "__main__":
    raise SystemExit(main())
