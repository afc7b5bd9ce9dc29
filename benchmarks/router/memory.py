"""Memory of held handles: a store in a process of its own is filled, its memory compared.

usage: python benchmarks/router/memory.py [--handles 100000] [--tokens 24576] [-o json]
"""

import argparse
import base64
import gc
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pd_connector.proof import SHORT, tokens_per_digest

CASES = (
    ("stock", "128", "aged"),
    ("stock", "16", "fresh"),
    ("stock", "16", "aged"),
    ("pdctl", "128", "fresh"),
    ("pdctl", "128", "aged"),
    ("pdctl", "16", "aged"),
)
"""Connector (pdctl's handles prove their tokens), block size in tokens, and engine: blocks of a
fresh one follow each other, of an aged one they do not."""
BLOCKS = {"128": 20_000, "16": 160_000}
"""KV blocks of a leg, so large that its block ids have as many digits as in earnest."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handles", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=24_576, help="of every handle")
    parser.add_argument("-o", dest="output", choices=("table", "json"), default="table")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(fill(given.handles, given.tokens, *given.case)))
        return 0
    rows = []
    for case in CASES:
        command = [sys.executable, __file__, "--handles", str(given.handles)]
        command += ["--tokens", str(given.tokens), "--case", *case]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
    if given.output == "json":
        print(json.dumps(rows))
        return 0
    print(
        "| connector | block size | engine | params as JSON, bytes | held, bytes | counted, bytes |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [*row.values()][:4]
        cells += [f"{row['held']:.0f}", f"{row['counted']:.0f}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    return 0


def fill(count: int, tokens: int, connector: str, block_size: str, engine: str) -> dict[str, Any]:
    from pd_router.handles import Handle, MemoryStore  # noqa: PLC0415
    from pd_router.history import MARK, Past  # noqa: PLC0415
    from pd_router.packing import pack  # noqa: PLC0415

    store = MemoryStore(
        ttl=450, capacity=count, max_bytes=1 << 40, branches=4, on_drop=lambda handle, why: None
    )
    draw, size, now = random.Random(0), 0, time.time()
    gc.collect()
    before = rss()
    for number in range(count):
        params = handle_params(draw, number, tokens, int(block_size), engine)
        if connector == "pdctl":
            params |= proof(draw, tokens, int(block_size))
        size += len(json.dumps(params, separators=(",", ":")))
        past = Past(
            "chat",
            40,
            tokens * 4,
            draw.randbytes(16),
            draw.randbytes(16),
            draw.randbytes(16),
            False,
            1,
            draw.randbytes(MARK * 40),
        )
        handle = Handle(
            id=f"{number:016x}",
            request=str(params["remote_request_id"]),
            key=draw.randbytes(16).hex(),
            packed=pack(params),
            leg="decode-0",
            engine="decode-0-1a2b3c4d",
            past=past,
            tokens=tokens,
            ids_digest=b"",
            proven=True,
            partial=True,
            turn=20,
            born=now,
            expires=now + 450,
        )
        store.put(handle)
    gc.collect()
    return {
        "connector": connector,
        "block_size": int(block_size),
        "engine": engine,
        "json": size // count,
        "held": (rss() - before) / count,
        "counted": store.bytes_held() / count,
    }


def handle_params(
    draw: random.Random, number: int, tokens: int, block_size: int, engine: str
) -> dict[str, Any]:
    blocks, most = -(-tokens // block_size), BLOCKS[str(block_size)]
    if engine == "fresh":
        first = draw.randrange(most - blocks)
        ids = list(range(first, first + blocks))
    else:
        ids = draw.sample(range(most), blocks)
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [ids],
        "remote_engine_id": "decode-0-1a2b3c4d",
        "remote_request_id": f"chatcmpl-{draw.randbytes(16).hex()}",
        "remote_host": "10.20.30.40",
        "remote_port": 5600,
        "tp_size": 8,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 123456.789 + number,
        "transfer_mode": "pull",
    }


def proof(draw: random.Random, tokens: int, block_size: int) -> dict[str, Any]:
    """What the pdctl connector adds: random digests are as long as true ones."""

    def digest(size: int) -> str:
        return base64.b64encode(draw.randbytes(size)).decode()

    stride = tokens_per_digest(tokens, block_size)
    digests = digest(SHORT * (tokens // stride))
    found = {"v": 2, "n": tokens, "b": block_size, "g": stride, "d": digests, "e": digest(16)}
    return {"pd_tokens": found, "pd_lease": {"v": 1}, "pd_sig": digest(16)}


def rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
