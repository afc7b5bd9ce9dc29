"""What computing and reading cost per token, and where reading becomes the cheaper one. Pure."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdctl.bench.evidence.check import expects_readback
from pdctl.bench.records import Row, Run
from pdctl.bench.stats import CONFIDENCE, Estimate, difference, quantile
from pdctl.errors import PdctlError

LEAST_POINTS = 6
_RESAMPLES = 500

Point = tuple[float, float]


@dataclass(frozen=True)
class Costs:
    """Milliseconds over tokens.

    ``compute``: a prompt of n tokens: c0 + c1 n + c2 n^2. ``reuse``: a prompt of which r tokens
    are read, less the computing of its other tokens: r0 + r1 r.
    """

    compute: tuple[float, float, float]
    reuse: tuple[float, float]

    def computed(self, tokens: float) -> float:
        c0, c1, c2 = self.compute
        return c0 + c1 * tokens + c2 * tokens * tokens

    def reused(self, tokens: float) -> float:
        return self.reuse[0] + self.reuse[1] * tokens

    def saved(self, tokens: float) -> float:
        """What reading this many tokens saves against computing them; negative: it costs."""
        return self.computed(tokens) - self.reused(tokens)

    def break_even(self, most: int) -> float | None:
        """Tokens from which on reading is faster; None when it is not up to ``most``."""
        if self.saved(most) <= 0:
            return None
        low, high = 0.0, float(most)
        if self.saved(low) >= 0:
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            if self.saved(middle) > 0:
                high = middle
            else:
                low = middle
        return high


@dataclass(frozen=True)
class Fit:
    costs: Costs
    break_even: Estimate | None
    """Tokens; None when reading never pays up to the longest prompt measured."""
    compute_ms_per_1k: Estimate
    read_ms_per_1k: float | None
    """Of the D->P read alone, as the engine timed it."""
    longest: int
    shortest_read: int
    points: tuple[int, int]
    """How many turns the two curves come from."""
    measured: list[tuple[int, Estimate]]
    """Tokens read, and what that saved against computing the same prompts, in ms of prefill; only
    for prompts that were measured both ways."""


def fit(run: Run) -> Fit:
    """From a run with an arm that computes and one that reads.

    Raises:
        PdctlError: it lacks one of them, or has too few turns.
    """
    computed, read = _rows(run)
    if min(len(computed), len(read)) < LEAST_POINTS:
        raise PdctlError(
            f"{run.folder}: {len(computed)} computed and {len(read)} read turns; a fit needs "
            f"{LEAST_POINTS} of each"
        )
    costs = _costs(computed, read)
    longest = int(max(row.prompt_tokens or 0 for row in computed))
    draw = random.Random("fit")
    drawn = [
        _costs(draw.choices(computed, k=len(computed)), draw.choices(read, k=len(read)))
        for _ in range(_RESAMPLES)
    ]
    value = costs.break_even(longest)
    # A resample in which reading never pays counts as the longest prompt.
    crossings = [
        crossing if (crossing := each.break_even(longest)) is not None else float(longest)
        for each in drawn
    ]
    per_1k = [1000 * (each.computed(longest) - each.computed(0)) / longest for each in drawn]
    reads = [(float(row.tokens_read or 0), row.read_ms) for row in read if row.read_ms]
    return Fit(
        costs=costs,
        break_even=None if value is None else _interval(value, crossings),
        compute_ms_per_1k=_interval(
            1000 * (costs.computed(longest) - costs.computed(0)) / longest, per_1k
        ),
        read_ms_per_1k=1000 * max(0.0, _line(reads)[1]) if len(reads) >= LEAST_POINTS else None,
        longest=longest,
        shortest_read=min(row.tokens_read or 0 for row in read),
        points=(len(computed), len(read)),
        measured=_measured(computed, read),
    )


def _measured(computed: Sequence[Row], read: Sequence[Row]) -> list[tuple[int, Estimate]]:
    found = []
    for tokens, prompt in sorted({(r.tokens_read or 0, r.prompt_tokens or 0) for r in read}):
        saved = difference(
            [r.prefill_ms or 0.0 for r in computed if r.prompt_tokens == prompt],
            [
                r.prefill_ms or 0.0
                for r in read
                if (r.tokens_read, r.prompt_tokens) == (tokens, prompt)
            ],
            f"{tokens}",
        )
        if saved is not None:
            found.append((tokens, saved))
    return found


def _interval(value: float, drawn: Sequence[float]) -> Estimate:
    rest = (1 - CONFIDENCE) / 2
    return Estimate(value, quantile(drawn, rest), quantile(drawn, 1 - rest))


def _rows(run: Run) -> tuple[list[Row], list[Row]]:
    """Turns whose prompt was all computed, and turns that read."""
    computed, read = [], []
    for arm in run.arms:
        for row in run.measured(arm["name"]):
            if row.error or row.prefill_ms is None or not row.prompt_tokens or row.cached_tokens:
                continue
            if row.route == "append":
                continue
            if row.tokens_read:
                if expects_readback(arm) is not False:
                    read.append(row)
            else:
                computed.append(row)
    return computed, read


def _costs(computed: Sequence[Row], read: Sequence[Row]) -> Costs:
    compute = _parabola([(float(r.prompt_tokens or 0), r.prefill_ms or 0.0) for r in computed])
    costs = Costs(compute, (0.0, 0.0))
    rest = []
    for row in read:
        tokens, prompt = float(row.tokens_read or 0), float(row.prompt_tokens or 0)
        computing_the_rest = costs.computed(prompt) - costs.computed(tokens)
        rest.append((tokens, (row.prefill_ms or 0.0) - computing_the_rest))
    return Costs(compute, _line(rest))


def _line(points: Sequence[Point]) -> tuple[float, float]:
    """By the median of slopes between all pairs (Theil and Sen): one stalled turn moves nothing."""
    slopes = [
        (y2 - y1) / (x2 - x1)
        for place, (x1, y1) in enumerate(points)
        for x2, y2 in points[place + 1 :]
        if x1 != x2
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    return statistics.median(y - slope * x for x, y in points), slope


def _parabola(points: Sequence[Point]) -> tuple[float, float, float]:
    """Least squares over the medians at each length, all coefficients of x at least zero."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    medians = [(x, statistics.median(ys)) for x, ys in sorted(by_x.items())]
    if len(medians) >= 3:
        found = _solve(medians)
        if found is not None and found[1] >= 0 and found[2] >= 0:
            return found
    intercept, slope = _line(medians if len(medians) > 1 else points)
    return intercept, max(slope, 0.0), 0.0


def _solve(points: Sequence[Point]) -> tuple[float, float, float] | None:
    """Normal equations, relative errors weighed alike."""
    scale = max(x for x, _ in points) or 1.0
    rows = [[0.0] * 4 for _ in range(3)]
    for x, y in points:
        weight = 1.0 / max(y, 1e-9) ** 2
        basis = (1.0, x / scale, (x / scale) ** 2)
        for i in range(3):
            for j in range(3):
                rows[i][j] += weight * basis[i] * basis[j]
            rows[i][3] += weight * basis[i] * y
    for i in range(3):
        pivot = max(range(i, 3), key=lambda r: abs(rows[r][i]))
        if abs(rows[pivot][i]) < 1e-12:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(3):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    c0, c1, c2 = (rows[i][3] / rows[i][i] for i in range(3))
    return c0, c1 / scale, c2 / scale**2
