"""Whether the arms were run alike, to their end and on legs that agree. Pure."""

from typing import Any

from pdctl.bench.evidence.check import Check
from pdctl.bench.records import Run
from pdctl.bench.stats import LEAST_SAMPLES

MOST_ERRORS = 0.01
MOST_ERROR_DIFFERENCE = 0.01


def complete(run: Run) -> Check:
    state = run.settings.get("state")
    missing = [arm["name"] for arm in run.arms if not run.measured(arm["name"])]
    if missing:
        return Check("run", False, f"nothing was measured for {', '.join(missing)}")
    repeats = {arm["name"]: len(run.arm_blocks(arm["name"])) for arm in run.arms}
    if len(set(repeats.values())) > 1:
        return Check("run", False, f"{state}: arms have different numbers of repeats: {repeats}")
    if state not in ("complete", "deadline"):
        return Check("run", False, f"its state is {state!r}, it did not come to its end")
    return Check("run", True, f"{state}, {min(repeats.values())} repeats of every arm")


def equal_load(run: Run) -> Check:
    """The same prompts of the same lengths, answered at the same length, offered alike."""
    name = "equal load"
    if differing := _offered_differently([arm["offered"] for arm in run.arms if "offered" in arm]):
        return Check(name, False, f"the arms were offered different loads: {differing}")
    shapes: dict[str, dict[Any, tuple[int | None, int | None]]] = {}
    for arm in run.arms:
        shapes[arm["name"]] = {
            row.place: (row.prompt_tokens or row.target_tokens, row.answer_tokens)
            for row in run.measured(arm["name"])
            if row.error is None
        }
    first, *others = shapes.items()
    for other, shape in others:
        places = shape.keys() & first[1].keys()
        missing = len(shape.keys() ^ first[1].keys())
        if missing:
            return Check(name, False, f"{missing} turns of {first[0]} and {other} have no match")
        for place in sorted(places):
            if shape[place] != first[1][place]:
                what = f"{place[0]} turn {place[2]}"
                return Check(
                    name,
                    False,
                    f"{what} has {first[1][place]} prompt and answer tokens in {first[0]}, "
                    f"{shape[place]} in {other}",
                )
    turns = len(first[1])
    return Check(name, True, f"{turns} turns in every arm, of equal prompt and answer lengths")


def _offered_differently(loads: list[dict[str, Any]]) -> str:
    """Every part of the loads that is not equal, such as ``concurrency 1 / 4``."""
    values = {key: [str(load.get(key)) for load in loads] for load in loads for key in load}
    return ", ".join(f"{key} {' / '.join(of)}" for key, of in values.items() if len(set(of)) > 1)


def legs_agree(run: Run) -> Check:
    """All legs of an arm run with the same settings, and with those of the arm."""
    name = "legs agree"
    unknown = set()
    for block in run.blocks:
        arm = run.arm(block.arm)
        if not block.legs:
            return Check(name, None, "no engine was asked for its settings")
        told = {leg: settings for leg, settings in block.legs.items() if settings}
        unknown |= block.legs.keys() - told.keys()
        for key in ("bidirectional", "recompute_threshold", "block_size", "kv_cache_dtype"):
            values = {leg: settings[key] for leg, settings in told.items() if key in settings}
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{leg}: {value}" for leg, value in sorted(values.items()))
                return Check(name, False, f"{block.arm}: {key} differs ({listed})")
        wanted = arm.get("bidirectional")
        wrong = [
            leg
            for leg, settings in told.items()
            if wanted is not None and settings.get("bidirectional") not in (None, wanted)
        ]
        if wrong:
            return Check(
                name,
                False,
                f"{block.arm}: {', '.join(wrong)} run with bidirectional {not wanted}",
            )
    if unknown:
        return Check(name, None, f"{', '.join(sorted(unknown))} do not say how they run")
    if not run.blocks:
        return Check(name, None, "no engine was asked for its settings")
    return Check(name, True, "every leg told the settings of its arm")


def errors(run: Run) -> Check:
    shares = {}
    for arm in run.arms:
        rows = run.measured(arm["name"])
        shares[arm["name"]] = sum(row.error is not None for row in rows) / max(len(rows), 1)
    listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    if max(shares.values()) > MOST_ERRORS:
        last = next(row.error for row in run.measured() if row.error is not None)
        return Check("errors", False, f"{listed}; such as: {last}")
    if max(shares.values()) - min(shares.values()) > MOST_ERROR_DIFFERENCE:
        return Check("errors", False, f"not equal: {listed}")
    return Check("errors", True, listed)


def samples(run: Run) -> Check:
    fewest = min(len(run.arm_blocks(arm["name"])) for arm in run.arms)
    if fewest < LEAST_SAMPLES:
        return Check(
            "samples", False, f"{fewest} repeats; an interval needs {LEAST_SAMPLES} or more"
        )
    return Check("samples", True, f"{fewest} of every turn")
