"""What is sent: conversations of turns, planned before anything runs. Pure; the seed decides."""

import dataclasses
import itertools
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from pdctl.errors import PdctlError

DEFAULT_LENGTHS: tuple[int, ...] = (2048, 4096, 8192, 12288, 16384, 20480, 24576)
"""Prompt tokens of the article's sweep, 2k to 24k."""
QUICK_LENGTHS: tuple[int, ...] = (1024, 2048, 3072, 4096, 5120, 6144)

Shape = Literal["grow", "second"]
MARGIN_TOKENS = 24
"""What a chat template may add around a short new message."""


@dataclass(frozen=True)
class Part:
    """One message to add. Either ``text`` as it is, or new text of ``tokens`` tokens; neither:
    as much new text as brings the prompt to the turn's ``target_tokens``."""

    role: str = "user"
    text: str | None = None
    tokens: int | None = None
    shared: bool = False
    """The same text in every conversation and repeat of the run, such as a system prompt."""


@dataclass(frozen=True)
class TurnPlan:
    parts: tuple[Part, ...]
    answer_tokens: int
    target_tokens: int | None = None
    gap_s: float = 0.0
    """Think time before it, after the end of the turn before."""


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: tuple[TurnPlan, ...]


@dataclass(frozen=True)
class Load:
    """How the conversations of one repeat are offered; the same for every arm."""

    concurrency: int = 1
    rate: float | None = None
    """New conversations per second; None: as soon as one ends, the next begins."""


@dataclass(frozen=True)
class Workload:
    """The conversations of one repeat, and of the warm-up before the first."""

    kind: str
    conversations: tuple[Conversation, ...]
    warmup: tuple[Conversation, ...]
    load: Load = field(default_factory=Load)

    def turns(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    def shared_tokens(self) -> int:
        """Of the beginnings that conversations have in common on purpose."""
        return max(
            sum(part.tokens or 0 for part in conversation.turns[0].parts if part.shared)
            for conversation in self.conversations
        )

    def described(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "conversations": len(self.conversations),
            "turns": self.turns(),
            "shared_tokens": self.shared_tokens(),
            "load": dataclasses.asdict(self.load),
        }


def sweep(
    lengths: tuple[int, ...], answer_tokens: int, new_tokens: int, shape: Shape, load: Load
) -> Workload:
    """The prompt-length sweep.

    Args:
        lengths: prompt tokens, ascending.
        new_tokens: of shape ``second``: what its second turn adds.
        shape: ``grow``: one conversation whose turns have these lengths, as in the article, after
            an opening turn of half the first. ``second``: a two-turn conversation per length,
            whose second prompt has it.
    """
    _check_lengths(lengths, answer_tokens, new_tokens, shape)
    if shape == "grow":
        opened = (lengths[0] // 2, *lengths)
        measured = [Conversation("sweep", _growing(opened, answer_tokens))]
        ends = tuple(sorted({opened[0], lengths[0], lengths[-1]}))
        warmup = [Conversation("warm-up", _growing(ends, answer_tokens))]
    else:
        measured = [
            _second(f"at-{length}", length, answer_tokens, new_tokens) for length in lengths
        ]
        picked = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
        warmup = [
            _second(f"warm-up-{length}", length, answer_tokens, new_tokens) for length in picked
        ]
    return Workload(f"sweep/{shape}", tuple(measured), tuple(warmup), load)


def _growing(lengths: tuple[int, ...], answer_tokens: int) -> tuple[TurnPlan, ...]:
    return tuple(TurnPlan((Part(),), answer_tokens, target_tokens=length) for length in lengths)


def _second(name: str, length: int, answer_tokens: int, new_tokens: int) -> Conversation:
    first = length - new_tokens - answer_tokens
    return Conversation(name, _growing((first, length), answer_tokens))


def _check_lengths(
    lengths: tuple[int, ...], answer_tokens: int, new_tokens: int, shape: Shape
) -> None:
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise PdctlError("--lengths: must ascend, such as 2048,4096,8192", 2)
    least = answer_tokens + MARGIN_TOKENS
    if shape == "second":
        if new_tokens < MARGIN_TOKENS:
            raise PdctlError(f"--new-tokens: must be {MARGIN_TOKENS} or more", 2)
        if lengths[0] < least + new_tokens + MARGIN_TOKENS:
            raise PdctlError(
                f"--lengths: {lengths[0]} leaves no first turn beside {new_tokens} new and "
                f"{answer_tokens} answer tokens",
                2,
            )
        return
    opened = (0, lengths[0] // 2, *lengths)
    for before, after in itertools.pairwise(opened):
        if after - before < least:
            raise PdctlError(
                f"--lengths: {after} must be at least {least} above {before}: an answer of "
                f"{answer_tokens} tokens and a new message lie between",
                2,
            )


def agentic(
    conversations: int,
    turns: int,
    system_tokens: int,
    answer_tokens: int,
    seed: str,
    load: Load,
    gap_s: float,
) -> Workload:
    """Agents: a long shared system prompt, a task, then tool results of very different sizes."""
    draw = random.Random(f"agentic {seed}")
    planned = tuple(
        Conversation(f"agent-{number}", _agent(draw, turns, system_tokens, answer_tokens, gap_s))
        for number in range(1, conversations + 1)
    )
    warmup = (Conversation("warm-up", _agent(draw, 2, system_tokens, answer_tokens, 0.0)),)
    return Workload("agentic", planned, warmup, load)


def _agent(
    draw: random.Random, turns: int, system_tokens: int, answer_tokens: int, gap_s: float
) -> tuple[TurnPlan, ...]:
    first = TurnPlan(
        (
            Part("system", tokens=system_tokens, shared=True),
            Part("user", tokens=draw.randint(60, 240)),
        ),
        answer_tokens,
    )
    later = []
    for _ in range(turns - 1):
        # Most results are short, a few are whole files.
        size = min(4096, max(32, int(draw.lognormvariate(5.3, 1.0))))
        gap = draw.expovariate(1 / gap_s) if gap_s else 0.0
        later.append(TurnPlan((Part("tool", tokens=size),), answer_tokens, gap_s=gap))
    return (first, *later)


def longest_target(workload: Workload) -> int | None:
    """Tokens of the longest prompt plus answer, where the plan says them."""
    targets = [
        turn.target_tokens + turn.answer_tokens
        for conversation in workload.conversations
        for turn in conversation.turns
        if turn.target_tokens
    ]
    return max(targets, default=None)
