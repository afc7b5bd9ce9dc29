"""Conversations drawn from distributions, as vLLM's multi-turn benchmark describes them.

Its input file is then ``{"filetype": "generate_conversations", "num_conversations": ...,
"prompt_input": {"num_turns", "prefix_num_tokens", "num_tokens", "common_prefix_num_tokens"},
"prompt_output": {"num_tokens"}}``, each a distribution (``benchmarks/multi_turn/README.md``).
``num_turns`` counts messages, user's and assistant's. The words are this benchmark's own, new at
every run; ``text_files`` are not read.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdctl.bench.workload import Conversation, Load, Part, TurnPlan, Workload
from pdctl.errors import PdctlError

FILETYPE = "generate_conversations"
MEDIAN_RATIO = 0.85
"""Of a lognormal distribution, median over mean, when only its ``average`` is given."""

Draw = Callable[[], int]


def generated(
    file: Path, described: dict[str, Any], answer_tokens: int | None, seed: str, load: Load
) -> Workload:
    """The conversations that the file describes; the seed decides.

    Args:
        answer_tokens: of every answer; None: as the file says.

    Raises:
        PdctlError: the description lacks something or has a wrong value (exit code 2).
    """
    draw = random.Random(f"generated {seed}")
    count = described.get("num_conversations")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PdctlError(f"{file}: num_conversations must be a whole number above 0", 2)

    def of(section: str, name: str, optional: bool = False) -> Draw:
        values = described.get(section)
        values = values.get(name) if isinstance(values, dict) else None
        if values is None and optional:
            return lambda: 0
        return _distribution(f"{file}: {section}.{name}", values, draw)

    common = of("prompt_input", "common_prefix_num_tokens", optional=True)()
    messages = of("prompt_input", "num_turns")
    prefix = of("prompt_input", "prefix_num_tokens")
    asked = of("prompt_input", "num_tokens")
    answered = of("prompt_output", "num_tokens")

    def conversation(number: int) -> Conversation:
        turns: list[TurnPlan] = []
        opening = (Part("system", tokens=common, shared=True),) if common > 0 else ()
        for turn in range(max(1, math.ceil(messages() / 2))):
            tokens = max(1, asked()) + (max(0, prefix()) if turn == 0 else 0)
            parts = (*(opening if turn == 0 else ()), Part("user", tokens=tokens))
            turns.append(TurnPlan(parts, answer_tokens or max(1, answered())))
        return Conversation(f"generated-{number}", tuple(turns))

    conversations = tuple(conversation(number) for number in range(1, count + 1))
    warmup = (Conversation("warm-up", conversations[0].turns[:2]),)
    return Workload(f"trace/{file.name}", conversations, warmup, load)


def _distribution(where: str, values: Any, draw: random.Random) -> Draw:
    if not isinstance(values, dict):
        raise PdctlError(f"{where}: must be a distribution", 2)

    def number(name: str, above: float = 0.0, default: float | None = None) -> float:
        value = values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= above:
            raise PdctlError(f"{where}.{name}: must be a number above {above:g}", 2)
        return float(value)

    kind = values.get("distribution")
    most = number("max", default=math.inf)
    if kind == "constant":
        constant = int(number("value", above=-1))
        return lambda: constant
    if kind == "uniform":
        low, high = int(number("min")), int(number("max"))
        if low > high:
            raise PdctlError(f"{where}: min is above max", 2)
        return lambda: draw.randint(low, high)
    if kind == "lognormal":
        mu, sigma = _lognormal(where, values, number)
        return lambda: round(min(draw.lognormvariate(mu, sigma), most))
    if kind == "poisson":
        mean = number("alpha")
        return lambda: int(min(_poisson(mean, draw), most))
    if kind == "zipf":
        alpha = number("alpha", above=1.0)
        return lambda: int(min(_zipf(alpha, draw), most))
    raise PdctlError(
        f"{where}: the distribution {kind!r} is none of constant, uniform, lognormal, poisson, "
        "zipf",
        2,
    )


def _lognormal(
    where: str, values: dict[str, Any], number: Callable[..., float]
) -> tuple[float, float]:
    """Mean and deviation of the logarithm."""
    if "average" not in values:
        return number("mean"), number("sigma")
    ratio = number("median_ratio", default=MEDIAN_RATIO)
    if ratio >= 1:
        raise PdctlError(f"{where}.median_ratio: must be below 1", 2)
    median = number("average") * ratio
    return math.log(median), math.sqrt(-2 * math.log(ratio))


def _poisson(mean: float, draw: random.Random) -> int:
    """Events of rate 1 in a time of ``mean``."""
    count, at = 0, draw.expovariate(1.0)
    while at < mean:
        count += 1
        at += draw.expovariate(1.0)
    return count


def _zipf(alpha: float, draw: random.Random) -> int:
    """By rejection from a power law (Devroye, Non-Uniform Random Variate Generation, X.6.1)."""
    power = 2.0 ** (alpha - 1)
    while True:
        value = math.floor((1.0 - draw.random()) ** (-1.0 / (alpha - 1)))
        slope = (1.0 + 1.0 / value) ** (alpha - 1)
        if draw.random() * value * (slope - 1) / (power - 1) <= slope / power:
            return int(value)
