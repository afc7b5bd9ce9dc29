"""What goes wrong with vLLM's own connector, and what becomes of it with pdctl's: a table.

usage: python -m benchmarks.connector.stock_faults {stock,pdctl}   (from the repository's root)

Starts a deployment of its own on two cores and breaks it on purpose: about 7 minutes with stock,
3 with pdctl. Every row is one run. With stock the plugin is not loaded either.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.conftest import CANARY, PDCTL, Deployment

from . import faults as of
from .broken_pair import HANGS, heal, start, stop_changed
from .faults import BOOM, DECODE_TTL, NO_ADDRESS, READS, SMUGGLED, Fault, payload

BPE = CANARY.with_name("canary-bpe")
Row = tuple[str, Fault] | tuple[str, Fault, str]
"""Name, fault, and the leg it needs if it does not need both."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("connector", choices=["stock", "pdctl"])
    every = range(1, len(STAGES) + 1)
    parser.add_argument("--stages", type=int, nargs="+", default=every, help=f"of {len(STAGES)}")
    arguments = parser.parse_args()
    connector = arguments.connector
    if connector == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    if not (CANARY / "config.json").is_file():
        subprocess.run([str(PDCTL), "canary", str(CANARY)], check=True)
    if not (BPE / "config.json").is_file():
        subprocess.run([str(PDCTL), "canary", "--tokenizer", "bpe", str(BPE)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder))
        deployment.client.timeout = httpx.Timeout(HANGS)
        try:
            run(deployment, connector, list(arguments.stages))
        finally:
            deployment.pdctl("down", deployment.name, "--grace", "5", ok=False)
    return 0


def run(deployment: Deployment, connector: str, wanted: list[int]) -> None:
    kv = deployment.spec["kv_transfer"]
    kv |= {"connector": connector, "decode_ttl": f"{DECODE_TTL}s"}
    deployment.spec["router"]["handle_ttl"] = f"{DECODE_TTL - 1}s"
    for number, (changes, faults) in enumerate(STAGES, 1):
        if number not in wanted:
            continue
        start(deployment, **{"model": str(CANARY)} | changes)
        for name, fault, *needs in faults:
            heal(deployment, needs or ["prefill", "decode"])
            begin = time.monotonic()
            try:
                seen = fault(deployment)
            except Exception as error:
                seen = f"({type(error).__name__}: {str(error).splitlines()[0]:.80})"
            took = time.monotonic() - begin
            print(f"{connector:<6} {name:<58} {seen}  [{took:.0f} s]", flush=True)


STAGES: list[tuple[dict[str, Any], list[Row]]] = [
    (
        {},
        [
            ("edited history with the old handle", of.edited_history),
            ("expired handle (policy as the spec's auto)", of.expired_handle),
            ("handle with a wrong port", of.wrong_port),
            ("handle used a second time", of.used_twice),
            ("handle with another's block ids", of.forged_blocks),
            ("handle with block ids out of range", of.out_of_range),
            ("streamed answer of decode", of.stream_without_handle),
            ("idle decode that keeps a turn", of.idle_with_a_kept_turn),
            ('{"foo": 1} to decode', of.unfreed),
            ("unknown rank on decode's side channel", of.garbage_on_side_channel),
            ("do_remote_prefill without blocks to decode", payload("decode", READS), "decode"),
            ('remote_num_tokens "boom" to prefill', payload("prefill", BOOM), "prefill"),
            (
                "parameters in vllm_xargs to prefill",
                payload("prefill", None, **SMUGGLED),
                "prefill",
            ),
            (
                "do_remote_prefill in a refused request to decode",
                of.refused_for_another_reason,
                "decode",
            ),
            (
                "do_remote_prefill without an address to decode",
                payload("decode", NO_ADDRESS),
                "decode",
            ),
        ],
    ),
    (
        {"leg": "prefill", "script": {'_policy":"fail"': '_policy":"recompute"'}},
        [("expired handle, policy recompute", of.expired_handle)],
    ),
    (
        {"leg": "decode", "script": {r"(?m)^nonce=.*$": "nonce=0123456789ab"}},
        [("decode restarted under its old engine id", of.same_engine_id_again)],
    ),
    (
        {"model": str(BPE)},
        [("honest second turn, BPE tokenizer", of.honest_with_bpe)],
    ),
    (
        {"leg": "prefill", "script": {'_kv_xfer":true': '_kv_xfer":false'}},
        [
            ("handle to a prefill with bidirectional off", of.handle_to_the_unwilling),
            (
                'remote_num_tokens "boom" to that prefill',
                payload("prefill", BOOM),
                "prefill",
            ),
        ],
    ),
]
"""What is changed for them, and the faults in their order."""


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_changed()
