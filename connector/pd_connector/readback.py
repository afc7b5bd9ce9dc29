"""What decode hands out of a finished turn, and whether prefill reads it back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pd_connector.contract import (
    REMOTE_BLOCK_IDS,
    REMOTE_ENGINE_ID,
    REMOTE_HOST,
    REMOTE_NUM_TOKENS,
    REMOTE_PORT,
    REMOTE_REQUEST_ID,
    Outcome,
)

_ADDRESS = (REMOTE_ENGINE_ID, REMOTE_REQUEST_ID, REMOTE_HOST, REMOTE_PORT)


class Decision(NamedTuple):
    """What is done with a prompt."""

    outcome: Outcome
    """``HIT`` when tokens are to be read, else why they are not."""
    tokens: int = 0
    """Tokens to read, 0 unless ``HIT``."""
    kept: int = 0
    """The handle's first tokens, as far as they are the prompt's: its blocks past them are
    dropped. 0 unless ``HIT``."""
    reason: str = ""
    """More about the outcome, for people."""

    @property
    def releases_handle(self) -> bool:
        """Whether decode is told at once that its blocks are not needed."""
        return self.outcome in (
            Outcome.BELOW_THRESHOLD,
            Outcome.LOCAL_HIT,
            Outcome.HISTORY_CHANGED,
        )


def tokens_held(handle: Mapping[str, Any]) -> int:
    """Tokens whose KV a handle's blocks hold; 0 when there is nothing to read."""
    groups = handle.get(REMOTE_BLOCK_IDS)
    tokens = handle.get(REMOTE_NUM_TOKENS)
    if not isinstance(groups, (list, tuple)) or not any(groups):
        return 0
    if any(handle.get(field) is None for field in _ADDRESS):
        return 0
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def decide(
    handle: Mapping[str, Any],
    *,
    enabled: bool,
    threshold: int,
    local_tokens: int,
    proven_tokens: Callable[[], int],
) -> Decision:
    """Decide about one prompt on the prefill leg.

    ``local_tokens`` of the prompt are in the leg's own prefix cache. Fewer than ``threshold``
    tokens beyond them are not worth a transfer. ``proven_tokens`` compares the prompt with the
    handle's tokens and tells how many first ones can be read; it is asked only when the answer
    matters.
    """
    if not enabled:
        return Decision(Outcome.DISABLED)
    held = tokens_held(handle)
    if not held:
        return Decision(Outcome.MISS)
    least = max(threshold, 1)
    if held < least:
        return Decision(Outcome.BELOW_THRESHOLD)
    if held - local_tokens < least:
        return Decision(Outcome.LOCAL_HIT)
    proven = proven_tokens()
    changed = f"the prompt is the handle's for {proven} of {held} tokens" if proven < held else ""
    if proven - local_tokens < least:
        return Decision(Outcome.HISTORY_CHANGED, reason=changed)
    return Decision(Outcome.HIT, proven - local_tokens, proven, changed)


def settled_tokens(*, computed: int, in_flight: int, known: int) -> int:
    """Tokens of a finished request whose KV is written and whose ids are known.

    ``computed`` is vLLM's num_computed_tokens, which also counts draft tokens past
    a stop and the ``in_flight`` tokens of a step that has not come back. Of the
    ``known`` ids the last one was sampled and need not have been an input yet.
    """
    return max(0, min(computed - in_flight, known - 1))


def blocks_of_tokens(
    block_ids: Sequence[list[int]], block_sizes: Sequence[int | None], tokens: int
) -> tuple[list[int], ...]:
    """``block_ids``, a list per cache group, without the blocks past ``tokens``.

    Prefill pairs its blocks with the last ones of the list, so one block too many
    would shift them all. Groups without a block size are left as they are.
    """
    return tuple(
        ids if size is None else ids[: -(-tokens // size)]
        for ids, size in zip(block_ids, block_sizes, strict=True)
    )
