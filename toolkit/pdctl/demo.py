"""One conversation held twice, with bidirectional transfer on and off, and told side by side."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from pd_connector.contract import Route
from pdctl.conversation import Messages, Turn, new_client, plain_answer, stream_turn, turn_text
from pdctl.counters import EngineCounters, engine_counters, settled
from pdctl.plan import Deployment
from pdctl.spec import Spec

LEAST_SHARE = 0.9
"""Of the tokens that decode holds, what has to come back for a turn to count as reused."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoTurn:
    """A turn, and what the prefill engines counted of it. ``plain`` is one engine's own answer."""

    number: int
    turn: Turn
    counted: EngineCounters
    plain: str | None = None


@dataclass(frozen=True)
class Comparison:
    """``on`` and ``off`` hold the same conversation, turn by turn."""

    on: list[DemoTurn]
    off: list[DemoTurn]

    def problems(self) -> list[str]:
        """What keeps it from showing the gain; empty when all is as it should be."""
        found = []
        for on, off in zip(self.on, self.off, strict=True):
            if on.turn.text != off.turn.text or on.turn.text != off.plain:
                found.append(f"turn {on.number}: the answers of on, off and plain differ")
            if off.counted.external_tokens:
                found.append(f"turn {on.number}: tokens were read back although it is off")
            if on.number > 1 and self.share_read_back(on.number) < LEAST_SHARE:
                found.append(
                    f"turn {on.number}: {self.share_read_back(on.number):.0%} of the turn before "
                    f"was read back ({on.turn.outcome})"
                )
        return found

    def share_read_back(self, number: int) -> float:
        """Part of the tokens that decode held after the turn before, that came back: 0 to 1."""
        before, now = self.on[number - 2], self.on[number - 1]
        # Decode holds the prompt and all of the answer but its last token, which it never ran.
        held = before.counted.prompt_tokens + before.turn.answer_tokens - 1
        return now.counted.external_tokens / held

    def prefill_gains(self) -> list[float]:
        """Prefill time without readback over that with it, of every turn from the second on."""
        return [
            off.turn.prefill_ms / on.turn.prefill_ms
            for on, off in zip(self.on[1:], self.off[1:], strict=True)
            if on.turn.prefill_ms and off.turn.prefill_ms
        ]


def hold_conversation(
    spec: Spec, deployment: Deployment, run_id: str, with_plain: bool, say: Say
) -> list[DemoTurn]:
    """Hold the spec's conversation through the running router.

    Args:
        run_id: makes the texts; the same id gives the same conversation.
        with_plain: also ask one engine alone for every answer.

    Raises:
        PdctlError: a turn fails, or the counters cannot be read.
    """
    benchmark = spec.benchmark
    router = deployment.router.url
    prefill = [leg.url for leg in deployment.role("prefill")]
    with new_client() as client:
        say("warming up")
        _warm_up(client, spec, deployment)
        messages: Messages = []
        turns: list[DemoTurn] = []
        conversation = f"pdctl-demo-{uuid.uuid4().hex}"
        for number in range(1, benchmark.turns + 1):
            text = turn_text(benchmark, run_id, number)
            messages.append({"role": "user", "content": text})
            before = engine_counters(client, prefill)
            turn = stream_turn(
                client,
                router,
                deployment.served_name,
                messages,
                benchmark.answer_tokens,
                conversation,
                Route.READBACK,
            )
            counted = _counted(client, prefill, before, turn)
            say(f"turn {number}: {turn.outcome}, first token after {turn.ttft_ms:.0f} ms")
            plain = None
            if with_plain:
                plain = plain_answer(
                    client, prefill[0], deployment.served_name, messages, benchmark.answer_tokens
                )
            messages.append({"role": "assistant", "content": turn.text})
            turns.append(DemoTurn(number, turn, counted, plain))
        return turns


def _warm_up(client: httpx.Client, spec: Spec, deployment: Deployment) -> None:
    """The first requests of an engine pay for what later ones have; keep that out of the table."""
    seed = f"warm-up-{uuid.uuid4().hex}"
    messages: Messages = []
    for number in (1, 2):
        text = turn_text(spec.benchmark, seed, number)
        messages.append({"role": "user", "content": text})
        answer = stream_turn(
            client, deployment.router.url, deployment.served_name, messages, 8, "pdctl-warm-up"
        )
        messages.append({"role": "assistant", "content": answer.text})


def _counted(
    client: httpx.Client, prefill: list[str], before: EngineCounters, turn: Turn
) -> EngineCounters:
    return settled(
        lambda: engine_counters(client, prefill) - before,
        lambda gain: gain.prompt_tokens >= (turn.prompt_tokens or 1),
    )
