"""Offering a workload to a target: conversations side by side, turns one after the other."""

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from pd_connector import contract
from pdctl.bench import engines
from pdctl.bench.client import Seen, Target, send
from pdctl.bench.engines import Counters, EngineLeg
from pdctl.bench.records import Row
from pdctl.bench.talk import Talk
from pdctl.bench.tokens import Tokenizer
from pdctl.bench.turn_counters import prompt_tokens, rounded, with_counters
from pdctl.bench.workload import Conversation, Load, TurnPlan


class ErrorBudgetSpent(Exception):
    """More turns failed than the run may have."""


@dataclass
class Budget:
    """How many turns may fail before the run stops."""

    share: float
    least: int = 3
    turns: int = 0
    failed: int = 0

    def count(self, row: Row) -> None:
        self.turns += 1
        self.failed += row.error is not None
        if self.failed > max(self.least, self.share * self.turns):
            raise ErrorBudgetSpent(
                f"{self.failed} of {self.turns} turns failed, the last with: {row.error}"
            )


@dataclass(frozen=True)
class Site:
    """Where an arm's turns go, and the engines behind it as far as they are known."""

    target: Target
    engines: list[EngineLeg] = field(default_factory=list)


@dataclass(frozen=True)
class Stretch:
    """One repeat of one arm."""

    arm: str
    repeat: int
    seed: str
    """Of the texts: equal in all arms."""
    salt: str | None
    """Of prefix caches: another in every arm."""
    endpoint: str
    warmup: bool = False
    per_turn_counters: bool = False


class Loader:
    """Offers conversations and hands every finished turn's row to ``done``."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        site: Site,
        tokenizer: Tokenizer,
        stretch: Stretch,
        done: Callable[[Row], None],
    ) -> None:
        self._client = client
        self._site = site
        self._tokenizer = tokenizer
        self._stretch = stretch
        self._done = done

    async def run(self, conversations: tuple[Conversation, ...], load: Load) -> None:
        """Raises what ``done`` raises, and PdctlError when a prompt cannot be made."""
        waiting = asyncio.Queue[Conversation]()
        for conversation in conversations:
            waiting.put_nowait(conversation)
        if load.rate:
            await self._at_rate(waiting, load)
        else:
            await _first_failure(
                [self._worker(waiting) for _ in range(min(load.concurrency, waiting.qsize()))]
            )

    async def _worker(self, waiting: "asyncio.Queue[Conversation]") -> None:
        while not waiting.empty():
            await self._converse(waiting.get_nowait())

    async def _at_rate(self, waiting: "asyncio.Queue[Conversation]", load: Load) -> None:
        """Conversations begin at random times of the given rate, whether or not others ended;
        those beyond the concurrency wait their turn."""
        assert load.rate
        draw = random.Random(f"arrivals {self._stretch.seed}")
        slots = asyncio.Semaphore(load.concurrency)

        async def after(delay: float, conversation: Conversation) -> None:
            await asyncio.sleep(delay)
            async with slots:
                await self._converse(conversation)

        at, tasks = 0.0, []
        while not waiting.empty():
            tasks.append(after(at, waiting.get_nowait()))
            at += draw.expovariate(load.rate)
        await _first_failure(tasks)

    async def _converse(self, conversation: Conversation) -> None:
        stretch = self._stretch
        # Never one that a router knows from an earlier run.
        name = f"bench-{uuid.uuid4().hex}"
        talk = Talk(self._tokenizer, f"{stretch.seed}/{conversation.id}", stretch.seed)
        ended: float | None = None
        for number, plan in enumerate(conversation.turns, 1):
            if plan.gap_s and ended is not None:
                await asyncio.sleep(plan.gap_s)
            prompt = await talk.next_prompt(number, plan, stretch.endpoint)
            before = await self._counters()
            began = time.time()
            gap = None if ended is None else began - ended
            seen = await send(
                self._client,
                self._site.target,
                prompt,
                plan.answer_tokens,
                name,
                stretch.salt,
            )
            ended = time.time()
            row = self._row(conversation.id, number, plan, seen, began, gap)
            if before is not None:
                row = with_counters(
                    row, before, await self._caught_up(before, seen), self._site.engines
                )
            self._done(row)
            if seen.error is not None:
                return
            talk.take_answer(seen)

    async def _counters(self) -> dict[str, Counters] | None:
        if not self._stretch.per_turn_counters:
            return None
        return await engines.all_counters(self._client, self._site.engines)

    async def _caught_up(
        self, before: dict[str, Counters], seen: Seen
    ) -> dict[str, Counters] | None:
        wanted = seen.prompt_tokens or 1

        def enough(now: dict[str, Counters]) -> bool:
            # Decode counts the whole prompt too, whoever computed it.
            decode = [leg.name for leg in self._site.engines if leg.role == "decode"]
            return sum(prompt_tokens(before[leg], now[leg]) for leg in decode) >= wanted

        if seen.error is not None:
            return await engines.all_counters(self._client, self._site.engines)
        return await engines.settled_counters(self._client, self._site.engines, enough)

    def _row(
        self,
        conversation: str,
        number: int,
        plan: TurnPlan,
        seen: Seen,
        began: float,
        gap: float | None,
    ) -> Row:
        told = seen.header
        prompt_tokens = told(contract.HEADER_PROMPT_TOKENS, int) or seen.prompt_tokens
        read = told(contract.HEADER_TOKENS_READ, int)
        computed = prompt_tokens - read if prompt_tokens and read is not None else None
        return Row(
            arm=self._stretch.arm,
            repeat=self._stretch.repeat,
            conversation=conversation,
            turn=number,
            warmup=self._stretch.warmup,
            started_at=round(began, 3),
            gap_s=rounded(gap),
            target_tokens=plan.target_tokens,
            prompt_tokens=prompt_tokens,
            tokens_read=read,
            computed_tokens=computed,
            answer_tokens=seen.answer_tokens,
            chunks=seen.chunks,
            ttft_ms=rounded(seen.ttft_ms),
            tpot_ms=rounded(seen.tpot_ms),
            latency_ms=rounded(seen.latency_ms),
            prefill_ms=told(contract.HEADER_PREFILL_MS, float),
            read_ms=told(contract.HEADER_READ_MS, float),
            read_bytes=told(contract.HEADER_READ_BYTES, int),
            outcome=told(contract.HEADER_REUSE, str),
            route=told(contract.HEADER_ROUTE, str),
            answer=seen.answer_digest,
            first_token=seen.first_token,
            first_logprob=seen.first_logprob,
            error=seen.error,
        )


async def _first_failure(work: list[Any]) -> None:
    """Wait for all; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
