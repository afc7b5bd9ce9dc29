"""Cost of the token proof on prefill and decode; exits 1 when one is over its limit.

usage: python benchmarks/connector/proof.py [-n RUNS]

Decode compares a prompt with prefill's digest of it and makes the digests of the finished turn,
256 answered tokens longer. Prefill compares them with its prompt before a
read, and makes one digest of its own prompt for decode. The limit is 1 ms per
32k tokens for everything that one prompt costs on one leg.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

from pd_connector.proof import continued, make_proof, packed, proof_seed, tokens_proven

SEED = proof_seed(("model", None, "model", None), None, None, b"k" * 32)
LIMIT_MS_PER_32K = 1.0
BLOCK = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=51, metavar="RUNS", help="runs of each (51)")
    runs = parser.parse_args().n
    print(f"median of {runs}, limit, slowest:")
    print(f"{'tokens':>7} {'leg':<8} {'what':<34} {'CPU ms':>7} {'limit':>6} {'slowest':>7}")
    slow = [tokens for tokens in (1024, 8192, 24576, 32768, 131072) if is_slow(tokens, runs)]
    return 1 if slow else 0


def is_slow(tokens: int, runs: int) -> bool:
    """Whether a leg is over its limit with a turn of this length; prints its rows."""
    ids = random.Random(1).choices(range(150_000), k=tokens)
    answer = ids[:256]
    turn = [*ids, *answer]
    ready, prompt = packed(ids), [*turn, *ids[:32]]
    ready_next = packed(prompt)
    proof = make_proof(SEED, turn, BLOCK)
    whole = make_proof(SEED, ids, BLOCK, whole_only=True)
    assert tokens_proven(whole, tokens, SEED, ids) == tokens
    assert tokens_proven(proof, len(turn), SEED, prompt) == len(turn)
    steps: dict[str, dict[str, Callable[[], object]]] = {
        "decode": {
            "compare the prompt with prefill's": lambda: tokens_proven(
                whole, tokens, SEED, packed(ids)
            ),
            "make digests of the turn": lambda: make_proof(SEED, continued(ready, answer), BLOCK),
        },
        "prefill": {
            "compare the prompt with decode's": lambda: tokens_proven(
                proof, len(turn), SEED, packed(prompt)
            ),
            "make one of the prompt": lambda: make_proof(
                SEED, ready_next[:], BLOCK, whole_only=True
            ),
        },
    }
    limit = LIMIT_MS_PER_32K * max(tokens, 32768) / 32768
    slow = False
    for leg, actions in steps.items():
        total = 0.0
        for what, action in actions.items():
            median, slowest = measured(action, runs)
            total += median
            print(f"{tokens:>7} {leg:<8} {what:<34} {median:7.3f} {'-':>6} {slowest:7.3f}")
        slow |= total > limit
        mark = "   OVER" if total > limit else ""
        print(f"{tokens:>7} {leg:<8} {'all of it':<34} {total:7.3f} {limit:6.1f}{mark}")
    print(f"{tokens:>7} field    {len(json.dumps(proof))} bytes")
    return slow


def measured(action: Callable[[], object], runs: int) -> tuple[float, float]:
    """Median and slowest, in milliseconds."""
    took = []
    for _ in range(runs):
        begin = time.thread_time()
        action()
        took.append((time.thread_time() - begin) * 1e3)
    return statistics.median(took), max(took)


if __name__ == "__main__":
    sys.exit(main())
