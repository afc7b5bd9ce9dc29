"""Whether a run carries a comparison: what has to hold, checked one by one. Pure.

No data is not ok: what nobody could tell makes the comparison invalid like what is wrong.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pd_connector.contract import Outcome, Route
from pdctl.bench import engines
from pdctl.bench.engines import gain
from pdctl.bench.records import Block, Row, Run
from pdctl.bench.stats import LEAST_SAMPLES

LEAST_SHARE = 0.9
"""Of the tokens that decode held, what has to come back, in that share of later turns."""
MOST_ERRORS = 0.01
MOST_ERROR_DIFFERENCE = 0.01
LEAST_EQUAL_FIRST = 0.75
"""In reduced precision a prompt computed in other pieces rounds differently, and now and then
another token wins. Wrong KV shows as next to no equal first tokens at all."""
COUNTER_TOLERANCE = 0.02


@dataclass(frozen=True)
class Check:
    """``ok`` None: nobody could tell."""

    name: str
    ok: bool | None
    detail: str


def expects_readback(arm: dict[str, Any]) -> bool | None:
    """Whether an arm's later turns have to read decode's blocks; None when it does not say."""
    if arm.get("route") is not None:
        return bool(arm["route"] == Route.READBACK.value)
    if arm.get("bidirectional") and not arm.get("asks"):
        return None
    if arm.get("bidirectional") is not None:
        return bool(arm["bidirectional"])
    return {"on": True, "off": False}.get(arm["name"])


def evidence(run: Run) -> list[Check]:
    """Every check that applies to the run's arms."""
    if len(run.arms) < 2:
        return [_legs(run), *_cold(run), _errors(run)]
    return [
        _complete(run),
        _load(run),
        _legs(run),
        *(_transferred(run, arm) for arm in run.arms if expects_readback(arm) is True),
        *(_not_transferred(run, arm) for arm in run.arms if expects_readback(arm) is False),
        *(_appended(run, arm) for arm in run.arms if arm.get("route") == Route.APPEND.value),
        *_cold(run),
        _errors(run),
        *_outputs(run),
        _samples(run),
    ]


def problems(checks: list[Check]) -> list[str]:
    """Why the comparison does not hold; empty when it does."""
    return [f"{check.name}: {check.detail}" for check in checks if not check.ok]


def _complete(run: Run) -> Check:
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


def _load(run: Run) -> Check:
    """The same prompts of the same lengths, answered at the same length, offered alike."""
    name = "equal load"
    loads = {str(arm["offered"]) for arm in run.arms if "offered" in arm}
    if len(loads) > 1:
        return Check(name, False, f"the arms were offered different loads: {' / '.join(loads)}")
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


def _legs(run: Run) -> Check:
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


def _totals(blocks: list[Block], role: str, name: str) -> float | None:
    """Growth of a counter over blocks and the legs of a role; None when nobody counted."""
    total, seen = 0.0, False
    for block in blocks:
        for leg, before in (block.before or {}).items():
            if leg.startswith(role):
                total += gain(before, (block.after or {}).get(leg, {}), name)
                seen = True
    return total if seen else None


def _later_turns(run: Run, arm: str) -> list[tuple[Row, int]]:
    """Turns after a conversation's first, with the tokens that decode held of the one before."""
    rows = {row.place: row for row in run.measured(arm) if row.error is None}
    later = []
    for (conversation, repeat, turn), row in rows.items():
        before = rows.get((conversation, repeat, turn - 1))
        if before is not None and before.prompt_tokens and before.answer_tokens:
            # Decode never ran the answer's last token.
            later.append((row, before.prompt_tokens + before.answer_tokens - 1))
    return later


def _transferred(run: Run, arm: dict[str, Any]) -> Check:
    """The engines' own counters show that KV came back from decode."""
    name = f"{arm['name']} reads back"
    blocks = run.arm_blocks(arm["name"])
    external = _totals(blocks, "prefill", engines.EXTERNAL)
    moved = _totals(blocks, "prefill", "nixl_bytes")
    if external is None:
        return Check(name, None, "no engine counters: nothing shows that KV moved")
    threshold = int((run.settings.get("about") or {}).get("recompute_threshold") or 0)
    later = [(row, held) for row, held in _later_turns(run, arm["name"]) if held >= threshold]
    if not later:
        return Check(name, None, "no conversation has a second turn")
    dry = [row for row, held in later if (row.tokens_read or 0) < LEAST_SHARE * held]
    if not external or not moved:
        return Check(
            name,
            False,
            f"prefill counted {external:.0f} tokens from decode and {moved or 0:.0f} bytes read: "
            f"nothing came back ({_outcomes(row for row, _ in later)})",
        )
    if len(dry) > (1 - LEAST_SHARE) * len(later):
        return Check(
            name,
            False,
            f"{len(dry)} of {len(later)} later turns read less than {LEAST_SHARE:.0%} of what "
            f"decode held ({_outcomes(dry)})",
        )
    told = sum(row.tokens_read or 0 for row in run.measured(arm["name"]))
    if abs(told - external) > COUNTER_TOLERANCE * external:
        return Check(
            name,
            False,
            f"the router told of {told} tokens read, the engines counted {external:.0f}: "
            "something else was served beside the run",
        )
    return Check(
        name,
        True,
        f"prefill counted {external:.0f} tokens and {(moved or 0) / 1e6:.1f} MB from decode in "
        f"{len(later)} later turns",
    )


def _outcomes(rows: Any) -> str:
    counted = Counter(row.outcome or "no outcome told" for row in rows)
    said = ", ".join(f"{outcome} x{times}" for outcome, times in counted.most_common())
    if counted.get(Outcome.MISS.value):
        said += "; miss: the handle was not kept, not sent or already used"
    return said or "no turns"


def _not_transferred(run: Run, arm: dict[str, Any]) -> Check:
    name = f"{arm['name']} reads nothing back"
    blocks = run.arm_blocks(arm["name"])
    external = _totals(blocks, "prefill", engines.EXTERNAL)
    if external is None:
        return Check(name, None, "no engine counters: nothing shows that no KV moved")
    transfers = _totals(blocks, "prefill", "nixl_transfers") or 0
    if external or transfers:
        return Check(
            name,
            False,
            f"prefill counted {external:.0f} tokens from decode in {transfers:.0f} reads",
        )
    return Check(name, True, "prefill counted no token and no read from decode")


def _appended(run: Run, arm: dict[str, Any]) -> Check:
    """Decode's own prefix cache held the history, and prefill computed nothing of later turns."""
    name = f"{arm['name']} uses decode's cache"
    later = [(row, held) for row, held in _later_turns(run, arm["name"])]
    known = [(row, held) for row, held in later if row.decode_cached_tokens is not None]
    if not known:
        return Check(name, None, "no counters of single turns (they need a concurrency of 1)")
    block = max(
        (
            counters.get("block_size", 0)
            for each in run.arm_blocks(arm["name"])
            for counters in (each.after or {}).values()
        ),
        default=0,
    )
    cold = [
        row for row, held in known if (row.decode_cached_tokens or 0) < LEAST_SHARE * held - block
    ]
    busy = [row for row, _ in known if row.computed_tokens]
    if len(cold) > (1 - LEAST_SHARE) * len(known):
        return Check(name, False, f"{len(cold)} of {len(known)} later turns were not in its cache")
    if busy:
        return Check(name, False, f"prefill computed in {len(busy)} of {len(known)} later turns")
    return Check(name, True, f"{len(known)} later turns, none of which prefill saw")


def _cold(run: Run) -> list[Check]:
    """No first turn found anything in a cache."""
    name = "cold caches"
    caching = bool((run.settings.get("about") or {}).get("prefill_prefix_caching"))
    seen = False
    for arm in run.arms:
        rows = [row for row in run.measured(arm["name"]) if row.turn == 1]
        warm = [row for row in rows if row.cached_tokens or row.tokens_read]
        warm += [row for row in rows if row.outcome == Outcome.LOCAL_HIT.value and row not in warm]
        local = _totals(run.arm_blocks(arm["name"]), "prefill", engines.LOCAL)
        seen = seen or local is not None
        if warm:
            row = warm[0]
            return [
                Check(
                    name,
                    False,
                    f"{arm['name']}: {len(warm)} first turns were not new to prefill "
                    f"({row.conversation}: {row.cached_tokens or row.tokens_read or 'some'} tokens "
                    "found)",
                )
            ]
        if local and not caching:
            return [
                Check(
                    name,
                    False,
                    f"{arm['name']}: prefill found {local:.0f} tokens in its own prefix cache",
                )
            ]
        history = sum(held for _, held in _later_turns(run, arm["name"]))
        if local and local > history:
            return [
                Check(
                    name,
                    False,
                    f"{arm['name']}: prefill found {local:.0f} tokens in its own cache, more than "
                    f"the {history} of earlier turns",
                )
            ]
        if run.settings["workload"]["kind"].startswith("sweep"):
            known = [row for row in rows if row.decode_cached_tokens]
            if known:
                return [
                    Check(
                        name,
                        False,
                        f"{arm['name']}: {len(known)} first turns were in decode's cache already "
                        f"({known[0].decode_cached_tokens} tokens of {known[0].conversation})",
                    )
                ]
    if not seen:
        return [Check(name, None, "no engine counters: nothing shows what the caches held")]
    return [Check(name, True, "no first turn found a token in prefill's or decode's caches")]


def _errors(run: Run) -> Check:
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


def _outputs(run: Run) -> list[Check]:
    """Every other arm answers like the first, at temperature 0."""
    first, *others = run.arms
    return [_same_outputs(run, first["name"], other["name"]) for other in others]


def _same_outputs(run: Run, one: str, other: str) -> Check:
    name = f"outputs of {one} and {other}"
    rows = {row.place: row for row in run.measured(one)}
    pairs = [
        (rows[row.place], row)
        for row in run.measured(other)
        if row.place in rows and row.answer and rows[row.place].answer
    ]
    if not pairs:
        return Check(name, None, "no turn was answered in both")
    equal = sum(before.answer == after.answer for before, after in pairs)
    exact = (run.settings.get("about") or {}).get("dtype") == "float32"
    if exact:
        if equal == len(pairs):
            return Check(name, True, f"all {equal} answers equal")
        after = next(two for one, two in pairs if one.answer != two.answer)
        return Check(
            name,
            False,
            f"{len(pairs) - equal} of {len(pairs)} answers differ, first {after.conversation} "
            f"turn {after.turn} of repeat {after.repeat}",
        )
    # A conversation's later prompts contain its earlier answers: compare while they are equal.
    comparable = _while_equal(pairs)
    first = sum(before.first_token == after.first_token for before, after in comparable)
    share = first / len(comparable)
    detail = (
        f"{first} of {len(comparable)} first tokens equal, {equal} of {len(pairs)} whole answers "
        f"(reduced precision; wanted {LEAST_EQUAL_FIRST:.0%} of the first tokens)"
    )
    return Check(name, share >= LEAST_EQUAL_FIRST, detail + _logprobs(comparable))


def _while_equal(pairs: list[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    """Pairs whose prompts are the same, since all answers before them were."""
    split: dict[tuple[str, int], int] = {}
    for before, after in pairs:
        if before.answer != after.answer:
            talk = (after.conversation, after.repeat)
            split[talk] = min(split.get(talk, after.turn), after.turn)
    return [
        (before, after)
        for before, after in pairs
        if after.turn <= split.get((after.conversation, after.repeat), after.turn)
    ]


def _logprobs(pairs: list[tuple[Row, Row]]) -> str:
    """How far the first tokens' log-probabilities are apart; where the tokens differ, whether it
    was a close call."""
    said = []
    for what, equal in (("equal", True), ("different", False)):
        gaps = [
            abs(before.first_logprob - after.first_logprob)
            for before, after in pairs
            if before.first_logprob is not None
            and after.first_logprob is not None
            and (before.first_token == after.first_token) is equal
        ]
        if gaps:
            said.append(f"{max(gaps):.3f} apart for {what} tokens")
    return f"; log-probabilities at most {', '.join(said)}" if said else ""


def _samples(run: Run) -> Check:
    fewest = min(len(run.arm_blocks(arm["name"])) for arm in run.arms)
    if fewest < LEAST_SAMPLES:
        return Check(
            "samples", False, f"{fewest} repeats; an interval needs {LEAST_SAMPLES} or more"
        )
    return Check("samples", True, f"{fewest} of every turn")
