"""What one check says, and what several of them count. Pure."""

from dataclasses import dataclass
from typing import Any

from pd_connector.contract import Route
from pdctl.bench.engines import gain
from pdctl.bench.records import Block, Row, Run

LEAST_SHARE = 0.9
"""Of the tokens that decode held, what has to come back, in that share of later turns."""


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


def totals(blocks: list[Block], role: str, name: str) -> float | None:
    """Growth of a counter over blocks and the legs of a role; None when nobody counted."""
    total, seen = 0.0, False
    for block in blocks:
        for leg, before in (block.before or {}).items():
            if leg.startswith(role):
                total += gain(before, (block.after or {}).get(leg, {}), name)
                seen = True
    return total if seen else None


def history(run: Run, arm: str) -> list[tuple[Row, int]]:
    """Answered turns, with the tokens that decode held of the turn before: 0 for a conversation's
    first. Left out where the turn before is not known."""
    rows = {row.place: row for row in run.measured(arm) if row.error is None}
    found = []
    for (conversation, repeat, turn), row in rows.items():
        before = rows.get((conversation, repeat, turn - 1))
        if turn == 1:
            found.append((row, 0))
        elif before is not None and before.prompt_tokens and before.answer_tokens:
            # Decode never ran the answer's last token.
            found.append((row, before.prompt_tokens + before.answer_tokens - 1))
    return found


def later_turns(run: Run, arm: str) -> list[tuple[Row, int]]:
    """Turns after a conversation's first, with the tokens that decode held of the one before."""
    return [(row, held) for row, held in history(run, arm) if row.turn > 1]
