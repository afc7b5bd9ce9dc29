"""How long decode should keep a finished turn's blocks. Pure.

The gaps between turns say how long is enough, decode's KV memory how long is possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_connector.contract import READ_MARGIN_SECONDS
from pdctl.bench.records import Run
from pdctl.errors import PdctlError

MEMORY_SHARE = 0.5
"""Of decode's KV cache, what waiting turns may hold; the rest is for running ones."""
ROOM = 1.25
"""Above the gap that is to be covered."""
LEAST_GAP_SECONDS = 0.5
"""A load whose turns follow each other faster than that says nothing about think time."""
LEAST_GAPS = 20


@dataclass(frozen=True)
class Ttl:
    """``covered``: share of gaps that end in time. ``pinned_share``: of decode's KV cache, held on
    average by waiting turns; None when the rate of turns is not known."""

    seconds: int
    covered: float
    pinned_share: float | None
    bound_by_memory: bool


def recommend_ttl(
    gaps: Sequence[float],
    turns_per_second: float | None,
    tokens_per_turn: float | None,
    kv_tokens: float | None,
) -> Ttl | None:
    """The TTL that covers all gaps, or as many as fit into memory; None with too few gaps.

    Args:
        gaps: seconds from the end of a turn to the beginning of the next.
        turns_per_second: of all conversations together, on one decode leg.
        tokens_per_turn: that a finished turn's blocks hold.
        kv_tokens: capacity of the decode leg's KV cache.
    """
    if len(gaps) < LEAST_GAPS:
        return None
    ordered = sorted(gaps)
    best: Ttl | None = None
    for place in (*range(len(ordered) // 20, len(ordered), max(1, len(ordered) // 40)), -1):
        seconds = int(ordered[place] * ROOM + READ_MARGIN_SECONDS) + 1
        covered = sum(gap <= seconds - READ_MARGIN_SECONDS for gap in ordered) / len(ordered)
        pinned = _pinned_share(ordered, seconds, turns_per_second, tokens_per_turn, kv_tokens)
        if pinned is not None and pinned > MEMORY_SHARE:
            bounded = best or Ttl(seconds, covered, pinned, True)
            return Ttl(bounded.seconds, bounded.covered, bounded.pinned_share, True)
        best = Ttl(seconds, covered, pinned, False)
    return best


def _pinned_share(
    gaps: Sequence[float],
    ttl: float,
    turns_per_second: float | None,
    tokens_per_turn: float | None,
    kv_tokens: float | None,
) -> float | None:
    """By Little's law: arrivals times the time each waits, which the TTL cuts off."""
    if not turns_per_second or not tokens_per_turn or not kv_tokens:
        return None
    waits = sum(min(gap, ttl) for gap in gaps) / len(gaps)
    return turns_per_second * waits * tokens_per_turn / kv_tokens


def gaps_of(run: Run) -> list[float]:
    """Think times in a run; empty when its load has none."""
    gaps = [row.gap_s for row in run.measured() if row.gap_s is not None]
    return gaps if gaps and sorted(gaps)[len(gaps) // 2] >= LEAST_GAP_SECONDS else []


def gaps_in(file: Path) -> list[float]:
    """Seconds, one number a line.

    Raises:
        PdctlError: it is not such a file (exit code 2).
    """
    try:
        lines = file.read_text(encoding="utf-8").split()
    except OSError as error:
        raise PdctlError(f"{file}: {error.strerror}", 2) from None
    gaps = []
    for number, line in enumerate(lines, 1):
        try:
            gaps.append(float(line))
        except ValueError:
            raise PdctlError(
                f"{file}: {number}. value {line!r} is no number of seconds", 2
            ) from None
        if not 0 <= gaps[-1] < 1e9:
            raise PdctlError(f"{file}: value {number}, {line}, is no gap in seconds", 2)
    return gaps
