"""What a run found: the numbers that every way of showing it starts from."""

from collections import Counter
from dataclasses import dataclass, field

from pdctl.bench.evidence.check import Check, expects_readback
from pdctl.bench.evidence.verdict import problems
from pdctl.bench.records import Run
from pdctl.bench.report.article import Reported
from pdctl.bench.stats import Estimate, Summary


@dataclass(frozen=True)
class Cell:
    """One arm at one prompt length (or turn number). Milliseconds, GB/s of 1e9 bytes."""

    ttft: Summary | None
    ttft_interval: Estimate | None
    prefill: Summary | None
    read_ms: Summary | None
    compute_ms: Summary | None
    read_gb_s: float | None
    read_bytes: float | None
    descriptors: float | None
    posting_share: float | None
    outside_ms: Summary | None
    """TTFT less the engines' own times: router, HTTP and client."""
    tpot: Summary | None
    tokens_read: float | None
    route: str | None


@dataclass(frozen=True)
class Group:
    """All arms at one prompt length (or turn number)."""

    label: str
    tokens: int | None
    cells: dict[str, Cell]
    ttft_ratio: dict[str, Estimate]
    """The base arm's median over this arm's; only where the evidence carries it."""
    prefill_ratio: dict[str, Estimate]


@dataclass(frozen=True)
class DecodeCost:
    """What an arm costs on decode."""

    tpot: Summary | None
    most_kv_usage: float | None
    preemptions: float | None


@dataclass(frozen=True)
class Beside:
    """A figure of the article and what was measured nearest to it."""

    reported: Reported
    measured_tokens: int | None
    off_ms: float | None
    on_ms: float | None
    ratio: Estimate | None


@dataclass(frozen=True)
class Result:
    run: Run
    checks: list[Check]
    base: str
    arms: list[str]
    by_length: list[Group]
    by_turn: list[Group]
    outcomes: dict[str, Counter[str]]
    decode: dict[str, DecodeCost]
    article: list[Beside]
    notices: list[str] = field(default_factory=list)

    @property
    def comparable(self) -> bool:
        """The evidence carries a comparison."""
        return len(self.arms) > 1 and not self.problems

    @property
    def code(self) -> int:
        """Exit code: 1 when a check fails, or when a comparison was asked for and does not hold."""
        failed = any(check.ok is False for check in self.checks)
        return int(failed or (len(self.arms) > 1 and not self.comparable))

    @property
    def problems(self) -> list[str]:
        return problems(self.checks)

    @property
    def verdict(self) -> str:
        if len(self.arms) < 2:
            return "NO COMPARISON"
        return "VALID" if self.comparable else "INVALID"

    @property
    def reader(self) -> str | None:
        """The arm that reads back."""
        arms = self.run.arms
        return next((arm["name"] for arm in arms if expects_readback(arm)), None)
