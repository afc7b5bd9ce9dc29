"""What breaks while blocks are kept or read, on real engines: nothing hangs, no token is wrong,
and the KV caches are back at their idle level within the lease. Exits 1 when one of it is not so.

READs go over TCP (UCX_TLS), so that they need both sides: with decode stopped they stay under way.

usage: python benchmarks/connector/crashes.py [--turns N] [--characters N] [--only CASE ...]
"""

import argparse
import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from rig import ALONE, Pair, complete, metrics, pair, text_of, until

from pd_connector import contract
from pd_connector.contract import CLAIM_SECONDS

TTL = 40
LEASE = TTL + CLAIM_SECONDS + contract.READ_MARGIN_SECONDS
"""Seconds after which a turn must be gone, whatever happens to its reader."""
TOKENS = 12
QUICK = 90.0
"""Seconds that no request may take: far below vLLM's own time limits, on a machine that is busy."""


@dataclass
class Case:
    name: str
    met: str = ""
    """What the blow met, to be sure that it met something."""
    outcomes: list[str] = field(default_factory=list)
    wrong: int = 0
    slowest: float = 0.0
    idle_after: float = 0.0
    """Seconds until both KV caches were empty."""
    faults: list[str] = field(default_factory=list)


Turn = tuple[str, dict[str, Any], str]
"""A prompt that continues a kept turn, the turn's handle, and the right answer to the prompt."""


class Crashes:
    def __init__(self, engines: Pair, turns: int, characters: int) -> None:
        self.engines = engines
        self.turns = turns
        self.characters = characters
        self.client = httpx.AsyncClient(timeout=QUICK, trust_env=False)
        self.cases: list[Case] = []
        self._made = 0
        self.leaders = {leg: engines.pid(leg) for leg in ("prefill-0", "decode-0")}

    async def kept(self) -> list[Turn]:
        """Turns that decode keeps, each with the answer that prefill alone gives to the next."""
        return list(await asyncio.gather(*(self._kept() for _ in range(self.turns))))

    async def _kept(self) -> Turn:
        self._made += 1
        text = text_of(self._made, self.characters)
        answer = await complete(self.client, self.engines.decode, text, TOKENS, ALONE)
        prompt = text + answer["choices"][0]["text"] + " and then"
        plain = await complete(self.client, self.engines.prefill, prompt, TOKENS)
        return prompt, answer[contract.KV_TRANSFER_PARAMS], plain["choices"][0]["text"]

    async def read(self, case: Case, turn: Turn, may_break: bool = False) -> None:
        prompt, handle, right = turn
        started = time.monotonic()
        try:
            answer = await complete(self.client, self.engines.prefill, prompt, TOKENS, handle)
        except (httpx.HTTPError, OSError) as error:
            case.outcomes.append("broken")
            if not may_break or isinstance(error, httpx.TimeoutException):
                case.faults.append(f"a prompt was not answered: {error!r:.120}")
            return
        finally:
            case.slowest = max(case.slowest, time.monotonic() - started)
        case.outcomes.append(answer[contract.KV_TRANSFER_PARAMS][contract.PD_REUSE]["outcome"])
        case.wrong += answer["choices"][0]["text"] != right

    async def leases(self, **order: Any) -> dict[str, Any]:
        url = f"{self.engines.decode}{contract.ENGINE_LEASES_PATH}"
        method = "POST" if order else "GET"
        key = self.engines.key()
        answer = await self.client.request(method, url, json=order or None, headers=key)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body

    async def frozen_amid_a_read(self, case: Case) -> list[str]:
        """The turns that are read now. Decode stands still, so that they stay unread: over TCP
        its side must answer."""
        ids: list[str] = []
        end = time.monotonic() + 30
        while not ids and time.monotonic() < end:
            ids = [turn["id"] for turn in (await self.leases())["turns"] if turn["reading"]]
        self.blow("decode-0", signal.SIGSTOP)
        await asyncio.sleep(1)
        seen = await metrics(self.client, self.engines.prefill)
        waiting = int(seen("vllm:num_requests_waiting_by_reason", reason="deferred"))
        case.met = f"{waiting} reads under way"
        if not waiting:
            case.faults.append("no read was under way")
        return ids

    def blow(self, leg: str, number: int) -> None:
        os.killpg(self.leaders[leg], number)

    async def healed(self, leg: str) -> None:
        done = await asyncio.to_thread(
            self.engines.pdctl, "up", str(self.engines.spec), "--skip-checks", "--timeout", "400"
        )
        if done.returncode:
            raise SystemExit(f"{leg} did not start again:\n{done.stderr}")
        self.leaders[leg] = self.engines.pid(leg)

    async def is_idle(self, url: str) -> bool:
        seen = await metrics(self.client, url)
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting")
        return not any(seen(name) for name in (*names, "vllm:num_requests_running"))

    async def end(self, case: Case, *urls: str) -> None:
        for url in urls:
            waited = await until("an idle KV cache", lambda url=url: self.is_idle(url), LEASE + 15)
            case.idle_after = max(case.idle_after, waited)
        if case.idle_after == float("inf"):
            case.faults.append("blocks stay in use")
        if case.wrong:
            case.faults.append(f"{case.wrong} wrong answers")
        self.cases.append(case)
        print(row(case), flush=True)

    async def start(self, name: str, broken: bool = False) -> tuple[Case, list[Any], list[str]]:
        """Reads that have started, and decode frozen amid one of them."""
        case = Case(name)
        turns = await self.kept()
        reads = [asyncio.create_task(self.read(case, turn, broken)) for turn in turns]
        return case, reads, await self.frozen_amid_a_read(case)

    async def a_turn_is_released_during_its_read(self) -> None:
        case, reads, ids = await self.start("release during a read")
        release = asyncio.create_task(self.leases(release=ids))
        await asyncio.sleep(0.5)
        self.blow("decode-0", signal.SIGCONT)
        answer = await release
        told = ("reading", "released", "unknown")
        case.met += ", told " + ", ".join(f"{len(answer[t])} {t}" for t in told if answer[t])
        await asyncio.gather(*reads)
        await self.end(case, self.engines.decode)

    async def a_turn_expires_during_its_read(self) -> None:
        case = Case("expiry during a read")
        turns = await self.kept()
        left = min(turn["seconds_left"] for turn in (await self.leases())["turns"])
        await asyncio.sleep(max(0.0, left - contract.READ_MARGIN_SECONDS - 3))
        left = min(turn["seconds_left"] for turn in (await self.leases())["turns"])
        reads = [asyncio.create_task(self.read(case, turn)) for turn in turns]
        await self.frozen_amid_a_read(case)
        await asyncio.sleep(left + 2)
        self.blow("decode-0", signal.SIGCONT)
        case.met += f", for {left + 3:.0f} s with {left:.0f} s left"
        await asyncio.gather(*reads)
        await self.end(case, self.engines.decode)

    async def a_read_outlasts_its_claim(self) -> None:
        """Decode may free and reuse the blocks: what was read must not count."""
        case, reads, _ = await self.start("a read outlasts its claim")
        await asyncio.sleep(CLAIM_SECONDS + 1)
        self.blow("decode-0", signal.SIGCONT)
        case.met += f", for {CLAIM_SECONDS + 2:.0f} s"
        await asyncio.gather(*reads)
        if "hit" in case.outcomes and "expired" not in case.outcomes:
            case.faults.append("a read that was too late was taken")
        await self.end(case, self.engines.decode)

    async def prefill_dies_during_reads(self) -> None:
        case, reads, _ = await self.start("kill -9 prefill during a read", broken=True)
        self.blow("prefill-0", signal.SIGKILL)
        self.blow("decode-0", signal.SIGCONT)
        await asyncio.gather(*reads)
        # Decode goes on.
        again = await complete(self.client, self.engines.decode, "still there", TOKENS)
        assert again["choices"][0]["text"]
        await self.end(case, self.engines.decode)
        await self.healed("prefill-0")

    async def decode_dies_during_reads(self) -> None:
        later = await self.kept()
        case, reads, _ = await self.start("kill -9 decode during a read")
        self.blow("decode-0", signal.SIGKILL)
        await asyncio.gather(*reads)
        await self.end(case, self.engines.prefill)

        case = Case("kill -9 decode between turns", met=f"{len(later)} handles")
        await asyncio.gather(*(self.read(case, turn) for turn in later))
        await self.end(case, self.engines.prefill)
        await self.healed("decode-0")

    async def run(self, only: list[str]) -> list[Case]:
        print(HEADER, flush=True)
        for name in only or SCENARIOS:
            await SCENARIOS[name](self)
        await self.client.aclose()
        return self.cases


SCENARIOS = {
    "release": Crashes.a_turn_is_released_during_its_read,
    "expiry": Crashes.a_turn_expires_during_its_read,
    "late": Crashes.a_read_outlasts_its_claim,
    "prefill": Crashes.prefill_dies_during_reads,
    "decode": Crashes.decode_dies_during_reads,
}
HEADER = "what                                  answers  wrong  slowest  idle after  met"


def row(case: Case) -> str:
    counted = {name: case.outcomes.count(name) for name in dict.fromkeys(case.outcomes)}
    outcomes = ", ".join(f"{name} {number}" for name, number in counted.items())
    return (
        f"{case.name:<38}{len(case.outcomes):>6} {case.wrong:>6} {case.slowest:>7.1f}s "
        f"{case.idle_after:>10.1f}s  {case.met}; {outcomes}"
        f"{''.join(f' FAULT: {fault}' for fault in case.faults)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="turns read at once")
    parser.add_argument("--characters", type=int, default=2400, help="of a turn's prompt")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=[], help="of the cases")
    options = parser.parse_args()
    changes: dict[str, dict[str, Any]] = {
        "kv_transfer": {"decode_ttl": f"{TTL}s"},
        "router": {"handle_ttl": f"{TTL - 1}s"},
        "fabric": {"env": {"UCX_TLS": "tcp,self"}},
        "engine": {"extra_args": {"decode": ["--num-gpu-blocks-override", "320"]}},
    }
    with pair(changes) as engines:
        cases = asyncio.run(Crashes(engines, options.turns, options.characters).run(options.only))
    return int(any(case.faults for case in cases))


if __name__ == "__main__":
    raise SystemExit(main())
