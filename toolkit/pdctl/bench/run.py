"""A whole run: bring up, warm up, offer the load arm by arm, keep rows and counters."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdctl.bench import engines
from pdctl.bench.aging import aging_load
from pdctl.bench.arms import Arm, order
from pdctl.bench.client import Target
from pdctl.bench.enginelog import transfers_in
from pdctl.bench.environment import environment
from pdctl.bench.load import Budget, ErrorBudgetSpent, Loader, Site, Stretch
from pdctl.bench.pace import Pace, minutes
from pdctl.bench.places import Place
from pdctl.bench.records import SCHEMA, Block, Row, RunFolder, load_run
from pdctl.bench.tokens import EngineTokenizer, EstimatingTokenizer, LocalTokenizer, Tokenizer
from pdctl.bench.workload import Conversation, Workload
from pdctl.errors import PdctlError

Say = Callable[[str], None]

_TIMEOUT = httpx.Timeout(900.0, connect=10.0)
_SAY_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Options:
    """How a run is made, whatever it is made on."""

    workload: Workload
    arms: list[Arm]
    repeats: int
    seed: str
    endpoint: str = "chat"
    rounds: int = 1
    error_share: float = 0.05
    age: bool = False
    deadline_s: float | None = None
    salt: bool = True
    tokenizer: Path | None = None
    command: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def new_settings(options: Options, spec_name: str | None) -> dict[str, Any]:
    """What ``run.json`` says of a run that begins."""
    return {
        "schema": SCHEMA,
        "id": uuid.uuid4().hex[:12],
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "state": "running",
        "spec": spec_name,
        "command": options.command,
        "arms": [arm.described() for arm in options.arms],
        "repeats": options.repeats,
        "rounds": options.rounds,
        "seed": options.seed,
        "endpoint": options.endpoint,
        "workload": options.workload.described(),
        "error_share": options.error_share,
        **options.extra,
    }


class Runner:
    """One run from its first start to its last row; ``go`` may be called once."""

    def __init__(self, options: Options, place: Place, out: RunFolder, say: Say) -> None:
        self._options = options
        self._place = place
        self._out = out
        self._say = say
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)
        self._budget = Budget(options.error_share)
        self._pace = Pace(options.arms, options.deadline_s)
        self._seen_lines: dict[str, int] = {}
        self._exact = True
        self._said_at = 0.0
        self._warm: set[str] = set()
        self._tokenizers: dict[str, Tokenizer] = {}

    def go(self, settings: dict[str, Any]) -> None:
        """Run what is not yet done.

        Raises:
            PdctlError: it cannot go on, or too many turns failed; what was measured is kept.
        """
        done = {(block.arm, block.repeat) for block in load_run(self._out.folder).blocks}
        todo = [
            (arm, repeat)
            for arm, repeat in order(
                self._options.arms, self._options.repeats, self._options.rounds
            )
            if (arm.name, repeat) not in done
        ]
        state = "failed"
        try:
            state = self._all(todo, settings)
        except ErrorBudgetSpent as spent:
            state = "error budget spent"
            raise PdctlError(f"stopped: {spent}") from None
        except KeyboardInterrupt:
            state = "interrupted"
            raise
        finally:
            self._out.write_settings(settings | {"state": state, "exact_lengths": self._exact})
            self._out.close()
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(self._client.aclose())
            self._loop.close()
            self._place.finish()

    def _all(self, todo: list[tuple[Arm, int]], settings: dict[str, Any]) -> str:
        described = False
        for place, (arm, repeat) in enumerate(todo):
            if self._pace.too_late(todo[place:]):
                self._say("stopping here: the next repeat would not end before the deadline")
                return "deadline"
            begin = time.monotonic()
            site, fresh = self._place.prepare(arm)
            if fresh:
                self._pace.started(time.monotonic() - begin)
                self._seen_lines.clear()
                self._warm.clear()
            if not described:
                self._out.write_environment(environment(site.engines))
                described = True
            if fresh or site.target.url not in self._tokenizers:
                self._tokenizers[site.target.url] = self._await(self._tokenizer(site))
            tokenizer = self._tokenizers[site.target.url]
            self._exact = tokenizer.exact
            if fresh and self._options.age:
                self._age(site, tokenizer, arm)
            begin = time.monotonic()
            self._warm_up(arm, repeat, site, tokenizer)
            self._stretch(arm, repeat, site, tokenizer)
            self._pace.took(arm, time.monotonic() - begin)
            left = self._pace.left(todo[place + 1 :])
            self._say(
                f"{arm.name}: repeat {repeat} of {self._options.repeats} done"
                + (f"; about {minutes(left)} left" if left else "")
            )
        return "complete"

    def _warm_up(self, arm: Arm, repeat: int, site: Site, tokenizer: Tokenizer) -> None:
        """All of it once per arm and start, since the first of everything is slow; later only
        what a restarted router needs."""
        conversations = self._options.workload.warmup
        if arm.name in self._warm:
            if arm.pin is None:
                return
            first = conversations[0]
            conversations = (Conversation(first.id, first.turns[:2]),)
        self._warm.add(arm.name)
        seed = f"warm-{uuid.uuid4().hex[:10]}"
        stretch = Stretch(arm.name, repeat, seed, seed, self._options.endpoint, True)
        self._offer(site, tokenizer, stretch, conversations)

    def _stretch(self, arm: Arm, repeat: int, site: Site, tokenizer: Tokenizer) -> None:
        options = self._options
        per_turn = options.workload.load.concurrency == 1 and bool(site.engines)
        seed = f"{options.seed}-{repeat}"
        salt = f"{seed}-{arm.name}" if options.salt else None
        stretch = Stretch(arm.name, repeat, seed, salt, options.endpoint, False, per_turn)
        before = self._await(engines.all_counters(self._client, site.engines))
        started_at = time.time()
        self._offer(site, tokenizer, stretch, options.workload.conversations)
        after = self._await(self._settled(site))
        logs = self._place.logs()
        legs = {
            leg.name: self._await(
                engines.settings_of(self._client, leg, logs.get(leg.name, ("", ""))[1])
            )
            for leg in site.engines
        }
        self._keep_transfers(arm, repeat, logs)
        self._out.add_block(Block(arm.name, repeat, started_at, time.time(), before, after, legs))

    def _offer(
        self, site: Site, tokenizer: Tokenizer, stretch: Stretch, conversations: Any
    ) -> None:
        def done(row: Row) -> None:
            self._out.add_row(row)
            self._budget.count(row)
            self._say_row(row)

        loader = Loader(self._client, site, tokenizer, stretch, done)
        self._await(loader.run(conversations, self._options.workload.load))

    def _age(self, site: Site, tokenizer: Tokenizer, arm: Arm) -> None:
        counters = self._await(engines.all_counters(self._client, site.engines)) or {}
        capacity = max((each.get("kv_tokens", 0) for each in counters.values()), default=0)
        conversations, load = aging_load(int(capacity), self._options.workload, self._options.seed)
        if not conversations:
            return
        begin = time.monotonic()
        seed = f"age-{uuid.uuid4().hex[:8]}"
        stretch = Stretch(arm.name, 0, seed, seed, self._options.endpoint, True)
        loader = Loader(self._client, site, tokenizer, stretch, self._budget.count)
        self._await(loader.run(conversations, load))
        self._say(
            f"aged the engines' free lists with {len(conversations)} prompts in "
            f"{time.monotonic() - begin:.0f} s"
        )

    async def _settled(self, site: Site) -> dict[str, engines.Counters] | None:
        """Counters at rest: they have not moved for a moment."""
        last = await engines.all_counters(self._client, site.engines)
        for _ in range(20):
            await asyncio.sleep(0.1)
            now = await engines.all_counters(self._client, site.engines)
            if now == last:
                break
            last = now
        return last

    async def _tokenizer(self, site: Site) -> Tokenizer:
        if self._options.tokenizer is not None:
            return LocalTokenizer(self._options.tokenizer)
        target = site.target
        prefill = [leg.url for leg in site.engines if leg.role == "prefill"]
        for url in (*prefill[:1], target.url):
            tokenizer = EngineTokenizer(self._client, url, target.model, target.key)
            if await tokenizer.works():
                return tokenizer
        if self._options.endpoint == "completions":
            raise PdctlError(
                f"{target.url} has no /tokenize: give --tokenizer FOLDER, or use --endpoint chat",
                2,
            )
        return EstimatingTokenizer(self._counted_by(target))

    def _counted_by(self, target: Target) -> Callable[[Any], Any]:
        async def count(messages: Any) -> int:
            body = {"model": target.model, "messages": messages, "max_tokens": 1}
            headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
            try:
                response = await self._client.post(
                    f"{target.url}/v1/chat/completions", json=body, headers=headers
                )
                return int(response.json()["usage"]["prompt_tokens"])
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise PdctlError(f"{target.url}: {error or type(error).__name__}") from None

        return count

    def _keep_transfers(self, arm: Arm, repeat: int, logs: dict[str, tuple[str, str]]) -> None:
        for leg, (role, text) in logs.items():
            found = transfers_in(text, leg, role)
            for transfer in found[self._seen_lines.get(leg, 0) :]:
                self._out.add_transfer({"arm": arm.name, "repeat": repeat, **transfer})
            self._seen_lines[leg] = len(found)

    def _await(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def _say_row(self, row: Row) -> None:
        now = time.monotonic()
        if row.error is not None:
            self._say(f"{row.arm}: {row.conversation} turn {row.turn}: {row.error}")
        elif now - self._said_at > _SAY_EVERY_SECONDS:
            self._said_at = now
            what = "warm-up" if row.warmup else f"repeat {row.repeat}"
            self._say(
                f"{row.arm}, {what}: {row.prompt_tokens or '?'} tokens, "
                f"{row.outcome or 'no outcome told'}, first token after {row.ttft_ms:.0f} ms"
            )
