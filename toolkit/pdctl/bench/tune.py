"""From measurements to settings."""

import math
from dataclasses import dataclass
from typing import Any

from pdctl.bench.arms import arms_named
from pdctl.bench.edit import with_value
from pdctl.bench.fit import Fit, fit
from pdctl.bench.records import Run
from pdctl.bench.ttl import Ttl, gaps_of, recommend_ttl
from pdctl.bench.workload import MARGIN_TOKENS, Conversation, Load, Part, TurnPlan, Workload
from pdctl.errors import PdctlError
from pdctl.spec import Spec

READS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Tokens to read back, in the tuner's own load; as far as the model's length goes."""
ANSWER_TOKENS = 4
NEW_TOKENS = 64
STEP = 16
"""Thresholds are rounded up to a multiple of this many tokens."""
ARMS = arms_named("recompute,readback")
"""Both on one start: the client asks for the route."""


@dataclass(frozen=True)
class Advice:
    """What to set and what it is worth.

    ``threshold`` None: reading never paid. ``gain_ms``: prefill time saved by a turn that reads
    ``gain_tokens``.
    """

    fit: Fit
    threshold: int | None
    ttl: Ttl | None
    now: dict[str, Any]
    gain_tokens: int
    gain_ms: float


def for_measuring(spec: Spec) -> Spec:
    """The spec with which even the smallest read is made."""
    kv = spec.kv_transfer.model_copy(update={"bidirectional": True, "recompute_threshold": 1})
    return spec.model_copy(update={"kv_transfer": kv})


def tuning_load(reads: tuple[int, ...], max_model_len: int) -> Workload:
    """A two-turn conversation for each number of tokens to read."""
    most = max_model_len - NEW_TOKENS - 2 * ANSWER_TOKENS
    fitting = [tokens for tokens in reads if MARGIN_TOKENS + 2 * ANSWER_TOKENS < tokens <= most]
    if not fitting:
        raise PdctlError(f"max_model_len {max_model_len} leaves nothing to read back", 2)
    conversations = tuple(_reading(f"read-{tokens}", tokens) for tokens in fitting)
    warmup = tuple(_reading(f"warm-up-{tokens}", tokens) for tokens in (fitting[0], fitting[-1]))
    return Workload("tune", conversations, warmup, Load())


def _reading(name: str, tokens: int) -> Conversation:
    # Decode holds the prompt and the answer but for its last token.
    first = tokens - ANSWER_TOKENS + 1
    second = first + ANSWER_TOKENS + NEW_TOKENS
    return Conversation(
        name,
        (
            TurnPlan((Part(),), ANSWER_TOKENS, target_tokens=first),
            TurnPlan((Part(),), ANSWER_TOKENS, target_tokens=second),
        ),
    )


def advise(run: Run, gaps: list[float], turns_per_second: float | None) -> Advice:
    """Settings for the deployment that a run was made on.

    Args:
        gaps: think times in seconds; empty: the run's own, where it has some.
        turns_per_second: of the expected load; None: the run's own.
    """
    found = fit(run)
    threshold = None
    if found.break_even is not None:
        threshold = max(STEP, math.ceil(found.break_even.value / STEP) * STEP)
    kv_tokens = min(
        (
            counters["kv_tokens"]
            for block in run.blocks
            for leg, counters in (block.after or {}).items()
            if leg.startswith("decode") and counters.get("kv_tokens")
        ),
        default=None,
    )
    rows = [row for row in run.measured() if row.error is None and row.prompt_tokens]
    tokens = sum((row.prompt_tokens or 0) + (row.answer_tokens or 0) for row in rows) / len(rows)
    ttl = recommend_ttl(
        gaps or gaps_of(run), turns_per_second or _turns_per_second(run), tokens, kv_tokens
    )
    return Advice(
        fit=found,
        threshold=threshold,
        ttl=ttl,
        now=run.settings.get("about") or {},
        gain_tokens=found.longest,
        gain_ms=found.costs.saved(found.longest),
    )


def _turns_per_second(run: Run) -> float | None:
    """Of a run that offers its load at a rate; a closed loop has none of its own."""
    rate = run.settings["workload"]["load"].get("rate")
    conversations = run.settings["workload"]["conversations"]
    return rate * run.settings["workload"]["turns"] / conversations if rate else None


def tuned_spec(text: str, advice: Advice, spec: Spec) -> str:
    """The spec's text with the advice in it; handles stay shorter-lived than blocks."""
    if advice.threshold is not None:
        text = with_value(text, ("kv_transfer", "recompute_threshold"), str(advice.threshold))
    if advice.ttl is not None:
        seconds = advice.ttl.seconds
        text = with_value(text, ("kv_transfer", "decode_ttl"), f"{seconds}s")
        handle = max(1, min(seconds - 1, seconds * 15 // 16))
        if handle != spec.router.handle_ttl:
            text = with_value(text, ("router", "handle_ttl"), f"{handle}s")
    return text
