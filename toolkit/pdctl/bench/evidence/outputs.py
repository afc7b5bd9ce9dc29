"""Whether the arms answered alike, at temperature 0. Pure."""

from pdctl.bench.evidence.check import Check
from pdctl.bench.records import Row, Run

LEAST_EQUAL_FIRST = 0.75
"""In reduced precision a prompt computed in other pieces rounds differently, and now and then
another token wins. Wrong KV shows as next to no equal first tokens at all."""


def outputs(run: Run) -> list[Check]:
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
