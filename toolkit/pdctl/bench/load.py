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
from pdctl.bench.client import Prompt, Seen, Target, send
from pdctl.bench.engines import Counters, EngineLeg, gain
from pdctl.bench.records import Row
from pdctl.bench.tokens import Messages, Tokenizer, ids_of_tokens, text_of_tokens, text_to_fill
from pdctl.bench.workload import Conversation, Load, Part, TurnPlan
from pdctl.errors import PdctlError


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
        talk = _Talk(self._tokenizer, f"{stretch.seed}/{conversation.id}", stretch.seed)
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
                row = _with_counters(row, before, await self._caught_up(before, seen), self._site)
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
            return sum(_prompt_tokens(before[leg], now[leg]) for leg in decode) >= wanted

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
            gap_s=_rounded(gap),
            target_tokens=plan.target_tokens,
            prompt_tokens=prompt_tokens,
            tokens_read=read,
            computed_tokens=computed,
            answer_tokens=seen.answer_tokens,
            chunks=seen.chunks,
            ttft_ms=_rounded(seen.ttft_ms),
            tpot_ms=_rounded(seen.tpot_ms),
            latency_ms=_rounded(seen.latency_ms),
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


class _Talk:
    """A conversation's history and its next prompts."""

    def __init__(self, tokenizer: Tokenizer, seed: str, shared_seed: str) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._shared_seed = shared_seed
        self._messages: Messages = []
        self._ids: list[int] = []

    async def next_prompt(self, number: int, plan: TurnPlan, endpoint: str) -> Prompt:
        for place, part in enumerate(plan.parts):
            seed = f"{self._seed}/{number}/{place}"
            if part.shared:
                seed = f"{self._shared_seed}/shared/{place}"
            if endpoint == "completions":
                self._ids += await self._new_ids(part, seed, plan)
            else:
                self._messages.append(
                    {"role": part.role, "content": await self._new_text(part, seed, plan)}
                )
                if part.role == "tool":
                    self._messages[-1]["tool_call_id"] = f"call-{number}"
        if endpoint == "completions":
            return Prompt(ids=list(self._ids))
        return Prompt(messages=list(self._messages))

    async def _new_text(self, part: Part, seed: str, plan: TurnPlan) -> str:
        if part.text is not None:
            return part.text
        if part.tokens is not None:
            return await text_of_tokens(self._tokenizer, part.role, seed, part.tokens)
        assert plan.target_tokens is not None
        return await text_to_fill(
            self._tokenizer, self._messages, part.role, seed, plan.target_tokens
        )

    async def _new_ids(self, part: Part, seed: str, plan: TurnPlan) -> list[int]:
        if part.text is not None:
            return await self._tokenizer.ids(part.text)
        wanted = part.tokens
        if wanted is None:
            assert plan.target_tokens is not None
            wanted = plan.target_tokens - len(self._ids)
        if wanted < 1:
            raise PdctlError(
                f"a prompt of {plan.target_tokens} tokens cannot be made: the history alone has "
                f"{len(self._ids)}"
            )
        return await ids_of_tokens(self._tokenizer, seed, wanted)

    def take_answer(self, seen: Seen) -> None:
        if seen.ids is not None:
            self._ids += seen.ids
        self._messages.append({"role": "assistant", "content": seen.text})


def _with_counters(
    row: Row, before: dict[str, Counters], after: dict[str, Counters] | None, site: Site
) -> Row:
    """What the engines counted of this turn alone, which nothing else ran beside."""
    if after is None:
        return row
    values: dict[str, Any] = dict(vars(row))

    def total(role: str, name: str) -> float:
        legs = [leg.name for leg in site.engines if leg.role == role]
        return sum(gain(before[leg], after[leg], name) for leg in legs)

    read = int(total("prefill", engines.EXTERNAL))
    if values["tokens_read"] is None and total("prefill", engines.COMPUTED):
        values["tokens_read"] = read
    values["computed_tokens"] = int(total("prefill", engines.COMPUTED))
    values["cached_tokens"] = int(total("prefill", engines.LOCAL))
    values["decode_cached_tokens"] = int(total("decode", engines.LOCAL))
    if total("prefill", "nixl_transfers"):
        values["read_ms"] = _rounded(total("prefill", "nixl_seconds") * 1000)
        values["read_post_ms"] = _rounded(total("prefill", "nixl_post_seconds") * 1000)
        values["read_bytes"] = int(total("prefill", "nixl_bytes"))
        values["read_descriptors"] = int(total("prefill", "nixl_descriptors"))
    if total("decode", "nixl_transfers"):
        values["pull_ms"] = _rounded(total("decode", "nixl_seconds") * 1000)
        values["pull_bytes"] = int(total("decode", "nixl_bytes"))
    for role, name, key in (
        ("prefill", "request_seconds", "prefill_engine_ms"),
        ("decode", "ttft_seconds", "decode_ttft_ms"),
    ):
        if seconds := total(role, name):
            values[key] = _rounded(seconds * 1000)
    usage = [after[leg.name].get("kv_usage") for leg in site.engines if leg.role == "decode"]
    values["decode_kv_usage"] = max((value for value in usage if value is not None), default=None)
    return Row(**values)


def _prompt_tokens(before: Counters, after: Counters) -> float:
    return sum(
        gain(before, after, name) for name in (engines.COMPUTED, engines.LOCAL, engines.EXTERNAL)
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


async def _first_failure(work: list[Any]) -> None:
    """Wait for all; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
