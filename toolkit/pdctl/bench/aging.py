"""Making a young engine old: the order of its free blocks.

On a freshly started engine neighbouring blocks are free, and merge into few descriptors of a
transfer; that flatters every read until the free list has been shuffled once.
"""

import random

from pdctl.bench.workload import Conversation, Load, Part, TurnPlan, Workload, longest_target

AT_ONCE = 8
SHARE = 1.2
"""Of the KV cache, what the prompts fill in all: every block is handed out once."""


def aging_load(
    kv_tokens: int, workload: Workload, seed: str
) -> tuple[tuple[Conversation, ...], Load]:
    """One-turn conversations of random lengths, side by side, so that blocks of different
    requests interleave and come back in another order than they went."""
    longest = longest_target(workload) or 4096
    draw = random.Random(f"age {seed}")
    planned: list[Conversation] = []
    filled = 0
    while filled < kv_tokens * SHARE:
        length = draw.randint(min(300, longest // 2), max(301, longest // 2))
        filled += length
        turn = TurnPlan((Part(),), draw.randint(2, 12), target_tokens=length)
        planned.append(Conversation(f"age-{len(planned)}", (turn,)))
    return tuple(planned), Load(concurrency=AT_ONCE)
