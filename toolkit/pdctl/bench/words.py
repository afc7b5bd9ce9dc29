"""Text that no cache has seen: the seed decides it."""

import random

_WORDS = (
    "block cache turn token leg route agent trace span lease prompt answer history tool call "
    "result query table index shard queue batch rank link rail port node fabric memory page"
).split()


def fresh_text(seed: str, characters: int) -> str:
    """Text of exactly this length; another seed gives another text from its first words on."""
    draw = random.Random(seed)
    pieces = [f"{draw.getrandbits(64):016x}"]
    length = len(pieces[0])
    while length < characters:
        piece = f" {draw.choice(_WORDS)} {draw.randrange(1000)}"
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)[:characters]
