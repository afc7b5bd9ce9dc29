"""Medians, P90, and ratios with intervals by bootstrap."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_SAMPLES = 3
"""With fewer on either side there is no interval, and so no ratio."""

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Of one quantity in one group."""

    n: int
    mean: float
    median: float
    p90: float


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float


def summary(values: Sequence[float]) -> Summary | None:
    """None when there are no values."""
    if not values:
        return None
    return Summary(
        len(values), statistics.fmean(values), statistics.median(values), quantile(values, 0.9)
    )


def quantile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratio(above: Sequence[float], below: Sequence[float], seed: str = "") -> Estimate | None:
    """Ratio of the medians; None without enough samples, or where it has no meaning."""
    if min(len(above), len(below)) < LEAST_SAMPLES or min(below) <= 0:
        return None
    draw = random.Random(f"ratio {seed}")

    def one() -> float:
        return _median(draw.choices(above, k=len(above))) / _median(
            draw.choices(below, k=len(below))
        )

    return _estimate(statistics.median(above) / statistics.median(below), one)


def difference(above: Sequence[float], below: Sequence[float], seed: str = "") -> Estimate | None:
    """Difference of the medians; None without enough samples."""
    if min(len(above), len(below)) < LEAST_SAMPLES:
        return None
    draw = random.Random(f"difference {seed}")

    def one() -> float:
        return _median(draw.choices(above, k=len(above))) - _median(
            draw.choices(below, k=len(below))
        )

    return _estimate(statistics.median(above) - statistics.median(below), one)


def median_interval(values: Sequence[float], seed: str = "") -> Estimate | None:
    """The median and its interval; None without enough samples."""
    if len(values) < LEAST_SAMPLES:
        return None
    draw = random.Random(f"median {seed}")
    return _estimate(
        statistics.median(values),
        lambda: _median(draw.choices(values, k=len(values))),
    )


def _median(values: list[float]) -> float:
    """As :func:`statistics.median`, and several times as fast for the few values of a resample."""
    values.sort()
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def _estimate(value: float, resampled: Callable[[], float]) -> Estimate:
    drawn = [resampled() for _ in range(RESAMPLES)]
    rest = (1 - CONFIDENCE) / 2
    return Estimate(value, quantile(drawn, rest), quantile(drawn, 1 - rest))
