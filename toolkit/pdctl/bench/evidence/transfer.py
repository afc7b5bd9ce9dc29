"""Whether KV went the way of each arm, by what the engines counted. Pure."""

from collections import Counter
from typing import Any

from pd_connector.contract import Outcome, Route
from pdctl.bench import engines
from pdctl.bench.evidence.check import LEAST_SHARE, Check, later_turns, totals
from pdctl.bench.records import Row, Run

COUNTER_TOLERANCE = 0.02


def transferred(run: Run, arm: dict[str, Any]) -> Check:
    """The engines' own counters show that KV came back from decode."""
    name = f"{arm['name']} reads back"
    blocks = run.arm_blocks(arm["name"])
    external = totals(blocks, "prefill", engines.EXTERNAL)
    moved = totals(blocks, "prefill", "nixl_bytes")
    if external is None:
        return Check(name, None, "no engine counters: nothing shows that KV moved")
    threshold = int((run.settings.get("about") or {}).get("recompute_threshold") or 0)
    later = [(row, held) for row, held in later_turns(run, arm["name"]) if held >= threshold]
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


def not_transferred(run: Run, arm: dict[str, Any]) -> Check:
    name = f"{arm['name']} reads nothing back"
    blocks = run.arm_blocks(arm["name"])
    external = totals(blocks, "prefill", engines.EXTERNAL)
    if external is None:
        return Check(name, None, "no engine counters: nothing shows that no KV moved")
    transfers = totals(blocks, "prefill", "nixl_transfers") or 0
    if external or transfers:
        return Check(
            name,
            False,
            f"prefill counted {external:.0f} tokens from decode in {transfers:.0f} reads",
        )
    return Check(name, True, "prefill counted no token and no read from decode")


def appended(run: Run, arm: dict[str, Any]) -> Check:
    """Decode's own prefix cache held the history, and prefill computed nothing of later turns."""
    name = f"{arm['name']} uses decode's cache"
    later = [(row, held) for row, held in later_turns(run, arm["name"])]
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


_NOT_TOLD = "no outcome told"
_MEANING = {
    Outcome.MISS.value: "the handle was not kept, not sent or already used",
    Route.APPEND.value: "decode computed the turns alone",
    _NOT_TOLD: "the turns named no conversation, or the router is not pdctl's",
}


def _became(row: Row) -> str:
    # What an appended turn found is known only when its answer ends.
    return row.outcome or (row.route if row.route == Route.APPEND.value else None) or _NOT_TOLD


def _outcomes(rows: Any) -> str:
    counted = Counter(_became(row) for row in rows)
    said = ", ".join(f"{outcome} x{times}" for outcome, times in counted.most_common())
    meant = [f"; {name}: {meaning}" for name, meaning in _MEANING.items() if counted.get(name)]
    return said + "".join(meant) or "no turns"
