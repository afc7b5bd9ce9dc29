"""Proof that a turn's KV comes back from decode: two turns, the engines' own counters, and the
answers of an engine alone."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from pd_connector import contract, telemetry
from pdctl.conversation import Messages, Turn, new_client, plain_answer, stream_turn, turn_text
from pdctl.counters import NOTHING, EngineCounters, engine_counters, router_counter, settled
from pdctl.errors import PdctlError
from pdctl.launch.probe import health_problem
from pdctl.plan import Deployment
from pdctl.spec import Spec

Report = Callable[["Step"], None]


@dataclass(frozen=True)
class Step:
    """One thing that has to hold."""

    name: str
    ok: bool
    detail: str


@dataclass
class Verification:
    steps: list[Step] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(step.ok for step in self.steps)


class _Broken(Exception):
    pass


class _Run:
    """The steps of one verification, in order; the first that breaks ends it."""

    def __init__(self, spec: Spec, deployment: Deployment, client: httpx.Client, report: Report):
        self.spec, self.deployment, self.client, self.report = spec, deployment, client, report
        self.router = deployment.router.url
        self.prefill = [leg.url for leg in deployment.role("prefill")]
        self.conversation = f"pdctl-verify-{uuid.uuid4().hex}"
        self.messages: Messages = []
        self.result = Verification()

    def check(self, name: str, ok: bool, good: str, bad: str) -> None:
        step = Step(name, ok, good if ok else bad)
        self.result.steps.append(step)
        self.report(step)
        if not ok:
            raise _Broken

    def legs(self) -> None:
        problems = {leg.name: health_problem(leg.url, 5.0) for leg in self.deployment.legs}
        bad = ", ".join(f"{name} {problem}" for name, problem in problems.items() if problem)
        self.check("legs are healthy", not bad, ", ".join(problems), bad)

    def turn(self, number: int) -> Turn:
        name = f"turn {number} streams an answer"
        benchmark = self.spec.benchmark
        text = turn_text(benchmark, self.conversation, number)
        self.messages.append({"role": "user", "content": text})
        try:
            turn = stream_turn(
                self.client,
                self.router,
                self.deployment.served_name,
                self.messages,
                benchmark.answer_tokens,
                self.conversation,
                contract.Route.READBACK,
            )
        except PdctlError as error:
            self.check(name, False, "", str(error))
            raise
        self.messages.append({"role": "assistant", "content": turn.text})
        self.check(name, True, f"first token after {turn.ttft_ms:.0f} ms", "")
        return turn

    def handle_kept(self, stored_before: int) -> None:
        stored = settled(
            lambda: router_counter(self.client, self.router, telemetry.ROUTER_HANDLES_STORED.name),
            lambda stored: stored > stored_before,
        )
        self.check(
            "decode returned a handle",
            stored > stored_before,
            "the router keeps it",
            "none came: "
            + (
                "bidirectional transfer is off in this spec"
                if not self.deployment.bidirectional
                else "is bidirectional_kv_xfer on in the decode leg, and does its log say that "
                "pd_connector is active?"
            ),
        )

    def handle_sent(self, turn: Turn, sent_before: int) -> None:
        sent = router_counter(self.client, self.router, telemetry.ROUTER_HANDLES_SENT.name)
        self.check(
            "the router sent it to prefill",
            sent > sent_before,
            "with turn 2",
            f"turn 2 went without one (outcome {turn.outcome or 'unknown'})",
        )

    def readback(self, turn: Turn, gain: EngineCounters, remembered: int) -> None:
        self.check(
            "prefill read tokens from decode",
            gain.external_tokens > 0,
            f"{gain.external_tokens} of {remembered} tokens of turn 1, "
            f"{gain.computed_tokens} computed",
            f"none (outcome {turn.outcome or 'unknown'}): prefill computed "
            f"{gain.computed_tokens} tokens; its log says why",
        )
        self.check(
            "NIXL moved bytes to prefill",
            gain.nixl_bytes > 0,
            f"{gain.nixl_bytes / 1e6:.2f} MB in {gain.nixl_transfers} transfer(s)",
            "its counter did not move: the tokens came from elsewhere",
        )
        self.check(
            "the router reports a hit",
            turn.outcome == contract.Outcome.HIT.value,
            f"{turn.tokens_read} tokens, prefill {turn.prefill_ms or 0:.0f} ms",
            f"it says {turn.outcome!r}",
        )

    def answers(self, turns: list[Turn]) -> None:
        for number, turn in enumerate(turns, 1):
            exact = self.spec.model.dtype == "float32"
            how = "equals" if exact else "begins like"
            name = f"turn {number}'s answer {how} an engine's alone"
            try:
                plain = plain_answer(
                    self.client,
                    self.prefill[0],
                    self.deployment.served_name,
                    self.messages[: 2 * number - 1],
                    self.spec.benchmark.answer_tokens,
                )
            except PdctlError as error:
                self.check(name, False, "", str(error))
                raise
            same = _common(turn.text, plain)
            # In 16 bits decode and prefill numerics part after some tokens on honest runs;
            # wrong KV shows in the first token.
            ok = turn.text == plain if exact else same > 0
            self.check(
                name,
                ok,
                f"{same} of {len(plain)} characters",
                f"differs after {same} of {len(plain)} characters: wrong KV was used",
            )


def verify(spec: Spec, deployment: Deployment, report: Report) -> Verification:
    """Hold two streamed turns through the running router and check every step of the reuse.

    Args:
        report: called with each step as it ends.
    """
    with new_client() as client:
        run = _Run(spec, deployment, client, report)
        try:
            _steps(run)
        except _Broken:
            pass
        except PdctlError as error:
            step = Step("counters can be read", False, str(error))
            run.result.steps.append(step)
            report(step)
        return run.result


def _steps(run: _Run) -> None:
    run.legs()
    stored = router_counter(run.client, run.router, telemetry.ROUTER_HANDLES_STORED.name)
    sent = router_counter(run.client, run.router, telemetry.ROUTER_HANDLES_SENT.name)

    def gain_since(start: EngineCounters) -> EngineCounters:
        return engine_counters(run.client, run.prefill) - start

    start = gain_since(NOTHING)
    first = run.turn(1)
    run.handle_kept(stored)
    one = settled(
        lambda: gain_since(start), lambda gain: gain.prompt_tokens >= (first.prompt_tokens or 1)
    )
    second = run.turn(2)
    run.handle_sent(second, sent)
    two = settled(
        lambda: gain_since(start) - one,
        lambda gain: (
            gain.prompt_tokens >= (second.prompt_tokens or 1)
            and (gain.external_tokens == 0 or gain.nixl_bytes > 0)
        ),
    )
    run.readback(second, two, (first.prompt_tokens or 0) + run.spec.benchmark.answer_tokens)
    run.answers([first, second])


def _common(left: str, right: str) -> int:
    return next(
        (index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )
