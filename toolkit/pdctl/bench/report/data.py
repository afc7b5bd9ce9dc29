"""What a run found, in numbers. Pure; every way of showing it starts here."""

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from pd_connector.telemetry import PROMPT_BANDS
from pdctl.bench.engines import gain
from pdctl.bench.evidence.check import expects_readback
from pdctl.bench.evidence.verdict import evidence, problems
from pdctl.bench.records import Row, Run
from pdctl.bench.report.article import FIGURES
from pdctl.bench.report.result import Beside, Cell, DecodeCost, Group, Result
from pdctl.bench.stats import Estimate, median_interval, ratio, summary

POSTING_SHARE = 0.5
MANY_DESCRIPTORS = 500
"""A read that spends this share of its time posting this many descriptors is bound by them, not
by the link. Few descriptors posted slowly mean that posting itself copies, as between processes
of one host without a GPU."""

NEAR = 0.15
"""A measured prompt length stands beside one of the article's when it differs by less."""


def result_of(run: Run) -> Result:
    checks = evidence(run)
    valid = len(run.arms) > 1 and not problems(checks)
    arms = [arm["name"] for arm in run.arms]
    base = _base(run)
    later = [row for row in run.measured() if row.turn > 1 and row.error is None]
    by_length = _groups(later, _length_key, arms, base, valid)
    every = [row for row in run.measured() if row.error is None]
    by_turn = _groups(every, lambda row: (f"turn {row.turn}", row.turn), arms, base, False)
    outcomes = {
        arm: Counter(
            "error" if row.error else row.outcome or row.route or "not told"
            for row in run.measured(arm)
        )
        for arm in arms
    }
    decode = {arm: _decode_cost(run, arm) for arm in arms}
    reader = next((arm["name"] for arm in run.arms if expects_readback(arm)), None)
    article = _beside(by_length, base, reader) if reader else []
    return Result(
        run, checks, base, arms, by_length, by_turn, outcomes, decode, article, _notices(later)
    )


def _base(run: Run) -> str:
    """What the others are compared with: what computes every prompt."""
    for arm in run.arms:
        if expects_readback(arm) is False and arm.get("route") != "append":
            return str(arm["name"])
    return str(run.arms[0]["name"])


def _length_key(row: Row) -> tuple[str, int]:
    if row.target_tokens:
        return f"{row.target_tokens:,}", row.target_tokens
    tokens = row.prompt_tokens or 0
    bound = next((bound for bound in PROMPT_BANDS if tokens <= bound), None)
    return (f"up to {bound:,}" if bound else f"above {PROMPT_BANDS[-1]:,}"), tokens


def _groups(
    rows: list[Row],
    key: Callable[[Row], tuple[str, int]],
    arms: list[str],
    base: str,
    valid: bool,
) -> list[Group]:
    grouped: dict[str, list[Row]] = {}
    found: dict[str, list[int]] = {}
    for row in rows:
        label, place = key(row)
        grouped.setdefault(label, []).append(row)
        found.setdefault(label, []).append(place)
    places = {label: round(statistics.median(each)) for label, each in found.items()}
    return [
        _group(label, places[label], grouped[label], arms, base, valid)
        for label in sorted(grouped, key=lambda label: places[label])
    ]


def _group(
    label: str, tokens: int, rows: list[Row], arms: list[str], base: str, valid: bool
) -> Group:
    by_arm = {arm: [row for row in rows if row.arm == arm] for arm in arms}
    cells = {arm: _cell(found, f"{label} {arm}") for arm, found in by_arm.items() if found}

    def ratios(value: Callable[[Row], float | None]) -> dict[str, Estimate]:
        below = _values(by_arm[base], value)
        found = {
            arm: ratio(below, _values(by_arm[arm], value), f"{label} {arm}")
            for arm in arms
            if arm != base and valid
        }
        return {arm: estimate for arm, estimate in found.items() if estimate is not None}

    return Group(
        label, tokens, cells, ratios(lambda row: row.ttft_ms), ratios(lambda row: row.prefill_ms)
    )


def _values(rows: list[Row], value: Callable[[Row], float | None]) -> list[float]:
    return [found for row in rows if (found := value(row)) is not None]


def _cell(rows: list[Row], seed: str) -> Cell:
    ttft = _values(rows, lambda row: row.ttft_ms)
    reads = [row for row in rows if row.read_ms and row.read_bytes]
    speed = summary([row.read_bytes / row.read_ms / 1e6 for row in reads])  # type: ignore[operator]
    posting = summary(
        [row.read_post_ms / row.read_ms for row in reads if row.read_post_ms is not None]  # type: ignore[operator]
    )
    sizes = summary(_values(reads, lambda row: row.read_bytes))
    descriptors = summary(_values(reads, lambda row: row.read_descriptors))
    tokens = summary(_values(rows, lambda row: row.tokens_read))
    return Cell(
        ttft=summary(ttft),
        ttft_interval=median_interval(ttft, seed),
        prefill=summary(_values(rows, lambda row: row.prefill_ms)),
        read_ms=summary(_values(reads, lambda row: row.read_ms)),
        compute_ms=summary(_values(rows, _compute_ms)),
        read_gb_s=speed.median if speed else None,
        read_bytes=sizes.median if sizes else None,
        descriptors=descriptors.median if descriptors else None,
        posting_share=posting.median if posting else None,
        outside_ms=summary(_values(rows, _outside_ms)),
        tpot=summary(_values(rows, lambda row: row.tpot_ms)),
        tokens_read=tokens.median if tokens else None,
        route=Counter(row.route or "" for row in rows).most_common(1)[0][0] or None,
    )


def _compute_ms(row: Row) -> float | None:
    """Prefill without the read."""
    if row.prefill_ms is None:
        return None
    return max(0.0, row.prefill_ms - (row.read_ms or 0.0))


def _outside_ms(row: Row) -> float | None:
    if row.ttft_ms is None or row.decode_ttft_ms is None:
        return None
    return max(0.0, row.ttft_ms - row.decode_ttft_ms - (row.prefill_engine_ms or 0.0))


def _decode_cost(run: Run, arm: str) -> DecodeCost:
    rows = [row for row in run.measured(arm) if row.error is None]
    usage = [row.decode_kv_usage for row in rows if row.decode_kv_usage is not None]
    preempted: float | None = None
    for block in run.arm_blocks(arm):
        for leg, before in (block.before or {}).items():
            if leg.startswith("decode"):
                after = (block.after or {}).get(leg, {})
                preempted = (preempted or 0.0) + gain(before, after, "preemptions")
                usage += [after["kv_usage"]] if "kv_usage" in after else []
    return DecodeCost(
        summary(_values(rows, lambda row: row.tpot_ms)), max(usage, default=None), preempted
    )


def _beside(groups: list[Group], base: str, reader: str) -> list[Beside]:
    found = []
    for reported in FIGURES:
        near = [
            group
            for group in groups
            if group.tokens
            and base in group.cells
            and abs(group.tokens - reported.tokens) <= NEAR * reported.tokens
        ]
        group = min(near, key=lambda g: abs((g.tokens or 0) - reported.tokens), default=None)
        if group is None or reader not in group.cells:
            found.append(Beside(reported, None, None, None, None))
            continue
        off, on = (getattr(group.cells[arm], reported.quantity) for arm in (base, reader))
        ratios = group.ttft_ratio if reported.quantity == "ttft" else group.prefill_ratio
        found.append(
            Beside(
                reported,
                group.tokens,
                off.median if off else None,
                on.median if on else None,
                ratios.get(reader),
            )
        )
    return found


def _notices(rows: list[Row]) -> list[str]:
    """What a reader has to know of the transfers."""
    reads = [
        row
        for row in rows
        if row.read_ms and row.read_post_ms is not None and row.read_descriptors and row.read_bytes
    ]
    if not reads:
        return []
    longest = max(reads, key=lambda row: row.read_bytes or 0)
    like = [row for row in reads if (row.read_bytes or 0) > 0.9 * (longest.read_bytes or 0)]
    share = summary([row.read_post_ms / row.read_ms for row in like])  # type: ignore[operator]
    descriptors = summary([float(row.read_descriptors or 0) for row in like])
    size = summary([(row.read_bytes or 0) / (row.read_descriptors or 1) / 1024 for row in like])
    assert share and descriptors and size
    if share.median < POSTING_SHARE or descriptors.median < MANY_DESCRIPTORS:
        return []
    return [
        f"Reads are bound by descriptors, not by the link: posting {descriptors.median:.0f} of "
        f"them ({size.median:.0f} KiB each) takes {share.median:.0%} of the longest reads. Larger "
        "kv_transfer.block_size and kv_transfer.cross_layer_blocks make fewer of them."
    ]


def versions(run: Run) -> dict[str, Any]:
    """Of the engines as they run, else of the packages beside pdctl."""
    told = {leg: version for leg, version in (run.environment.get("engines") or {}).items()}
    return {"engines": told, "packages": run.environment.get("packages") or {}}
