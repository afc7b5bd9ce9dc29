"""Prefill and decode throughput with pdctl's connector against vLLM's own, measured in pairs.

Two pairs of engines run side by side; one works at a time, in the order A B B A A B B A ...
Everything is on for ours: token proofs, signed handles, claims, leases, metrics and spans. vLLM's
own spans are on for both. Each rep prefills and then decodes the same prompts; a ratio compares
two neighbouring reps. CPU seconds are those of all processes of the two legs, which other load
on the machine disturbs less than it does the clock.

usage: python benchmarks/connector/overhead.py [--reps N] [--limit S] [--prompts N]
       [--characters N] [--tokens N] [--json FILE]
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from legcpu import cpu_seconds, hold_to
from rig import FRESH, Pair, complete, metrics, pair, text_of, until
from tests.otlp import Receiver

from pd_connector import contract

TTL = 1
"""Seconds: neither decode leg keeps turns while the other pair is measured."""


@dataclass
class Rep:
    prefill: float
    """Prompt tokens per second."""
    decode: float
    """Generated tokens per second."""
    prefill_cpu: float
    """CPU seconds of the prefill leg."""
    decode_cpu: float


class Side:
    """One pair of engines under measurement."""

    def __init__(self, engines: Pair) -> None:
        self.engines = engines
        self.leaders = [engines.pid("prefill-0"), engines.pid("decode-0")]
        for core, leader in enumerate(self.leaders):
            # vLLM moves a CPU worker's computing thread to the last core, pdctl's connector back.
            hold_to(leader, core)
        self.client = httpx.AsyncClient(timeout=120, trust_env=False)

    async def rep(self, options: argparse.Namespace, number: int) -> Rep:
        prompts = [text_of((number, i), options.characters) for i in range(options.prompts)]
        cpu = [cpu_seconds(leader) for leader in self.leaders]
        started = time.perf_counter()
        prefilled = [
            await complete(self.client, self.engines.prefill, prompt, 1, FRESH, **trace())
            for prompt in prompts
        ]
        middle = time.perf_counter()
        for answer in prefilled:
            answer[contract.KV_TRANSFER_PARAMS].pop(contract.PD_REUSE, None)
        await asyncio.gather(
            *(
                complete(
                    self.client,
                    self.engines.decode,
                    prompt,
                    options.tokens,
                    answer[contract.KV_TRANSFER_PARAMS],
                    **trace(),
                )
                for prompt, answer in zip(prompts, prefilled, strict=True)
            )
        )
        end = time.perf_counter()
        used = [cpu_seconds(leader) - c for leader, c in zip(self.leaders, cpu, strict=True)]
        return Rep(
            sum(map(len, prompts)) / (middle - started),
            options.prompts * options.tokens / (end - middle),
            *used,
        )

    async def quiet(self) -> None:
        """Wait until decode keeps nothing."""

        async def empty() -> bool:
            seen = await metrics(self.client, self.engines.decode)
            return not seen("vllm:kv_cache_usage_perc")

        await until("decode keeps nothing", empty)


def trace() -> dict[str, Any]:
    trace_id, span_id = f"{random.getrandbits(128):032x}", f"{random.getrandbits(64):016x}"
    return {"headers": {"traceparent": f"00-{trace_id}-{span_id}-01"}}


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios and its 95 % interval (bootstrap over pairs)."""
    logs = [math.log(ratio) for ratio in ratios]
    source = random.Random(0)
    means = sorted(statistics.fmean(source.choices(logs, k=len(logs))) for _ in range(4000))
    return tuple(math.exp(v) for v in (statistics.fmean(logs), means[100], means[-101]))  # type: ignore[return-value]


async def measure(ours: Side, stock: Side, options: argparse.Namespace) -> list[tuple[Rep, Rep]]:
    pairs: list[tuple[Rep, Rep]] = []
    started = time.perf_counter()
    for number in range(-1, options.reps):
        if time.perf_counter() - started > options.limit:
            break
        order = [("ours", ours), ("stock", stock)]
        if number % 2:
            order.reverse()
        reps = {}
        for name, side in order:
            reps[name] = await side.rep(options, number)
            await side.quiet()
        if number >= 0:
            pairs.append((reps["ours"], reps["stock"]))
            print(
                f"rep {number:>2}: prefill {reps['ours'].prefill:>6.0f} / "
                f"{reps['stock'].prefill:>6.0f} tokens/s   decode {reps['ours'].decode:>6.1f} / "
                f"{reps['stock'].decode:>6.1f} tokens/s   [{time.perf_counter() - started:.0f} s]",
                flush=True,
            )
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=16)
    parser.add_argument("--limit", type=float, default=600, help="seconds in which reps begin")
    parser.add_argument("--prompts", type=int, default=4, help="per rep")
    parser.add_argument("--characters", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="generated per prompt")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    receiver = Receiver()

    def changes(connector: str) -> dict[str, dict[str, Any]]:
        env = {"HF_HUB_OFFLINE": 1, "VLLM_NO_USAGE_STATS": 1}
        return {
            "kv_transfer": {"connector": connector, "decode_ttl": f"{TTL}s"},
            "router": {"handle_ttl": "0.5s"},
            "observability": {"otlp_endpoint": receiver.url, "otlp_protocol": "http/protobuf"},
            "engine": {"env": env},
        }

    with pair(changes("pdctl")) as ours, pair(changes("stock")) as stock:
        pairs = asyncio.run(measure(Side(ours), Side(stock), options))
    receiver.close()
    names = {span.name for span in receiver.spans}
    print(f"\nspans of ours: {sorted(name for name in names if name.startswith('pd.'))}")
    print(f"{len(pairs)} pairs, ours against stock: ratio of means [95 % interval]")
    for name, better in (
        ("prefill", "tokens/s"),
        ("decode", "tokens/s"),
        ("prefill_cpu", "CPU seconds"),
        ("decode_cpu", "CPU seconds"),
    ):
        mean, low, high = interval([getattr(a, name) / getattr(b, name) for a, b in pairs])
        print(f"  {name.split('_')[0]:<8} {better:<12} {mean:.4f} [{low:.4f}, {high:.4f}]")
    if options.json:
        rows = [(vars(a), vars(b)) for a, b in pairs]
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
