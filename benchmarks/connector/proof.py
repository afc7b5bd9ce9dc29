"""Cost of the token proof on prefill and decode; exits 1 when one is over its limit.

usage: python benchmarks/connector/proof.py [-n RUNS]

Decode makes the digests of a finished turn once. Prefill compares them with its prompt before a
read, and makes one digest of its own prompt for decode, which compares it. The limit is 1 ms per
32k tokens for everything that one prompt costs on one leg.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

from pd_connector.proof import make_proof, packed, proof_seed, tokens_proven

SEED = proof_seed(("model", None, "model", None), None, None, b"k" * 32)
LIMIT_MS_PER_32K = 1.0
BLOCK = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=51, metavar="RUNS", help="runs of each (51)")
    runs = parser.parse_args().n
    print(
        f"{'tokens':>7} {'leg':<8} {'what':<34} {'ms':>7} {'limit':>6}   median of {runs}, slowest"
    )
    slow = [tokens for tokens in (1024, 8192, 24576, 32768, 131072) if is_slow(tokens, runs)]
    return 1 if slow else 0


def is_slow(tokens: int, runs: int) -> bool:
    """Whether a leg is over its limit with a turn of this length; prints its rows."""
    ids = random.Random(1).choices(range(150_000), k=tokens)
    prompt = [*ids, *ids[:32]]
    ready = packed(prompt)
    proof = make_proof(SEED, ids, BLOCK)
    whole = make_proof(SEED, prompt, BLOCK, whole_only=True)
    assert tokens_proven(proof, tokens, SEED, prompt) == tokens
    steps: dict[str, dict[str, Callable[[], object]]] = {
        "decode": {
            "compare the prompt with prefill's": lambda: tokens_proven(
                whole, len(prompt), SEED, prompt
            ),
            "make digests of the turn": lambda: make_proof(SEED, ids[:], BLOCK),
        },
        "prefill": {
            "compare the prompt with decode's": lambda: tokens_proven(
                proof, tokens, SEED, packed(prompt)
            ),
            "make one of the prompt": lambda: make_proof(SEED, ready[:], BLOCK, whole_only=True),
        },
    }
    limit = LIMIT_MS_PER_32K * max(tokens, 32768) / 32768
    slow = False
    for leg, actions in steps.items():
        total = 0.0
        for what, action in actions.items():
            median, slowest = measured(action, runs)
            total += median
            print(f"{tokens:>7} {leg:<8} {what:<34} {median:7.3f} {'-':>6}   {slowest:.3f}")
        slow |= total > limit
        mark = "   OVER" if total > limit else ""
        print(f"{tokens:>7} {leg:<8} {'all of it':<34} {total:7.3f} {limit:6.1f}{mark}")
    print(f"{tokens:>7} field    {len(json.dumps(proof))} bytes")
    return slow


def measured(action: Callable[[], object], runs: int) -> tuple[float, float]:
    """Median and slowest, in milliseconds."""
    took = []
    for _ in range(runs):
        begin = time.perf_counter()
        action()
        took.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(took), max(took)


if __name__ == "__main__":
    sys.exit(main())
