"""Whether the caches were cold: no prompt found more than its own conversation had left. Pure."""

from pd_connector.contract import Outcome
from pdctl.bench import engines
from pdctl.bench.evidence.check import Check, history, totals
from pdctl.bench.records import Row, Run

TEMPLATE_TOKENS = 64
"""What a chat template may put before every conversation's first message."""

NAME = "cold caches"


def cold(run: Run) -> Check:
    """Only what a conversation's own earlier turns left was in a cache, or what the workload
    shares between conversations on purpose."""
    counted = False
    for arm in run.arms:
        found = _warm(run, arm["name"])
        if found is not None:
            return Check(NAME, False, f"{arm['name']}: {found}")
        counted = (
            counted or totals(run.arm_blocks(arm["name"]), "prefill", engines.LOCAL) is not None
        )
    if not counted:
        return Check(NAME, None, "no engine counters: nothing shows what the caches held")
    return Check(NAME, True, "no turn found more than its own conversation had left")


def _warm(run: Run, arm: str) -> str | None:
    """What shows that a cache of this arm was warm."""
    limits = _limits(run, arm)
    caching = bool((run.settings.get("about") or {}).get("prefill_prefix_caching"))
    return (
        _first_turns(limits)
        or _on_prefill(run, arm, limits, caching)
        or _on_decode(run, arm, limits)
    )


def _limits(run: Run, arm: str) -> list[tuple[Row, int]]:
    """Every turn, with the tokens that it may find in a cache."""
    offered = run.arm(arm).get("offered") or run.settings["workload"]
    shared = int(offered.get("shared_tokens") or 0)
    return [
        (row, held if row.turn > 1 else TEMPLATE_TOKENS + shared) for row, held in history(run, arm)
    ]


def _first_turns(limits: list[tuple[Row, int]]) -> str | None:
    """A first turn has nothing to read back, and nothing to find on prefill."""
    warm = [
        row
        for row, limit in limits
        if row.turn == 1
        and (
            (row.cached_tokens or 0) > limit
            or row.tokens_read
            or (row.outcome == Outcome.LOCAL_HIT.value and limit <= TEMPLATE_TOKENS)
        )
    ]
    if not warm:
        return None
    row = warm[0]
    return (
        f"{len(warm)} first turns were not new to prefill ({row.conversation}: "
        f"{row.cached_tokens or row.tokens_read or 'some'} tokens found)"
    )


def _on_prefill(run: Run, arm: str, limits: list[tuple[Row, int]], caching: bool) -> str | None:
    local = totals(run.arm_blocks(arm), "prefill", engines.LOCAL) or 0
    if local and not caching:
        return f"prefill found {local:.0f} tokens in its own prefix cache"
    warm = [(row, limit) for row, limit in limits if (row.cached_tokens or 0) > limit]
    if warm:
        row, limit = warm[0]
        return (
            f"{len(warm)} turns were in prefill's cache already ({row.cached_tokens} tokens of "
            f"{row.conversation} turn {row.turn}, whose own turns had left {limit})"
        )
    return _too_much("prefill", local, limits)


def _on_decode(run: Run, arm: str, limits: list[tuple[Row, int]]) -> str | None:
    """A prompt shorter than a block is never found: a later turn that finds more than the
    conversation had left tells of it."""
    warm = [(row, limit) for row, limit in limits if (row.decode_cached_tokens or 0) > limit]
    if warm:
        row, limit = warm[0]
        left = f", whose own turns had left {limit}" if row.turn > 1 else ""
        return (
            f"{len(warm)} turns were in decode's cache already ({row.decode_cached_tokens} tokens "
            f"of {row.conversation} turn {row.turn}{left})"
        )
    local = totals(run.arm_blocks(arm), "decode", engines.LOCAL) or 0
    return _too_much("decode", local, limits)


def _too_much(role: str, local: float, limits: list[tuple[Row, int]]) -> str | None:
    """All turns together found more than earlier ones had left."""
    most = sum(limit for _, limit in limits)
    if local <= most:
        return None
    return (
        f"{role} found {local:.0f} tokens in its own cache, more than the {most} of earlier turns"
    )
