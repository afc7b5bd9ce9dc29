"""What goes wrong with vLLM's own connector, and what becomes of it with pdctl's: a table.

usage: python -m benchmarks.connector.stock_faults {stock,pdctl}   (from the repository's root)

Starts a deployment of its own on two cores and breaks it on purpose: about 7 minutes with stock,
3 with pdctl. Every row is one run. With stock the plugin is not loaded either.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from tests.e2e import legs
from tests.e2e.conftest import CANARY, PDCTL, Deployment

from pd_connector import contract
from pdctl.conversation import user_text

from .legcpu import cpu_seconds

BPE = CANARY.with_name("canary-bpe")
DECODE_TTL = 20
HANGS = 30.0
"""Seconds without an answer that count as hanging: a turn takes one or two."""
FIRST = 240.0
"""Seconds for the first turn of a start."""

Fault = Callable[[Deployment], str]
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
        deployment.spec["model"]["id"] = changes.get("model", str(CANARY))
        deployment.write()
        stop_changed()
        shutil.rmtree(deployment.folder / "changed", ignore_errors=True)
        deployment.pdctl("up", "SPEC", "--bidir", "on")
        if leg := changes.get("leg"):
            start_changed(deployment, leg, changes["script"])
        warm_up(deployment)
        for name, fault, *needs in faults:
            heal(deployment, needs or ["prefill", "decode"])
            begin = time.monotonic()
            try:
                seen = fault(deployment)
            except Exception as error:
                seen = f"({type(error).__name__}: {str(error).splitlines()[0]:.80})"
            took = time.monotonic() - begin
            print(f"{connector:<6} {name:<58} {seen}  [{took:.0f} s]", flush=True)


def warm_up(deployment: Deployment) -> None:
    """First prompts and the handshakes of both directions take longer than any hang."""
    deployment.client.timeout = httpx.Timeout(FIRST)
    history = user_text(f"warm {time.monotonic()}", 300)
    with contextlib.suppress(KeyError, AssertionError):
        answer, _, handle = legs.turn(deployment, history)
        if not CHANGED:
            legs.turn(deployment, history + answer + " go on", handle)
    deployment.client.timeout = httpx.Timeout(HANGS)


CHANGED: list[subprocess.Popen[bytes]] = []
"""A leg that runs a changed script, which pdctl would not start."""


def start_changed(deployment: Deployment, leg: str, changes: dict[str, str]) -> None:
    """Put a leg with a changed start script in the place of pdctl's."""
    folder = deployment.folder / "changed"
    if not folder.is_dir():
        deployment.pdctl("render", "SPEC", "--bidir", "on", "-o", str(folder))
        script = folder / f"{leg}-0.sh"
        text = script.read_text()
        for pattern, new in changes.items():
            text = re.sub(pattern, new, text)
        script.write_text(text)
        os.killpg(deployment.status()[f"{leg}-0"]["pid"], signal.SIGKILL)
        time.sleep(1)
    secret = deployment.folder / "state" / deployment.name / "secret"
    CHANGED.append(
        subprocess.Popen(
            ["bash", str(folder / f"{leg}-0.sh")],
            stdout=(deployment.folder / "changed.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {contract.SECRET_FILE_VARIABLE: str(secret)},
        )
    )
    while not healthy(deployment, getattr(deployment, f"{leg}_url")):
        time.sleep(1)


def stop_changed() -> None:
    for process in CHANGED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    CHANGED.clear()


def heal(deployment: Deployment, needs: list[str]) -> None:
    """Restart the engines that an earlier fault broke, when a needed one is among them."""
    if CHANGED or all(healthy(deployment, getattr(deployment, f"{leg}_url")) for leg in needs):
        return
    for leg in deployment.status().values():
        # What is broken may look healthy to pdctl.
        if leg["name"] != "router-0" and leg["pid"] and not healthy(deployment, leg["url"]):
            os.killpg(leg["pid"], signal.SIGKILL)
    time.sleep(1)
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def healthy(deployment: Deployment, url: str) -> bool:
    return legs.healthy(deployment, url)


def after(deployment: Deployment, url: str, answer: Callable[[], httpx.Response]) -> str:
    """What a request gets, and whether its engine lives on."""
    try:
        got = answer()
        seen = f"HTTP {got.status_code}"
        if got.status_code == 400:
            seen += f" {got.json()['error']['message']:.70}"
    except httpx.TimeoutException:
        seen = f"no answer in {HANGS:g} s"
    except httpx.HTTPError as error:
        seen = type(error).__name__
    time.sleep(1)
    return seen + ("" if healthy(deployment, url) else "; THE ENGINE IS DEAD")


def equal(text: str, expected: str) -> str:
    same = sum(a == b for a, b in zip(text, expected, strict=False))
    return f"{same} of {len(expected)} tokens right"


def edited_history(deployment: Deployment) -> str:
    history = user_text("edited", 500)
    answer, _, handle = legs.turn(deployment, history, tokens=32)
    prompt = "Z" + history[1:] + answer + " go on"
    text, _, _ = legs.turn(deployment, prompt, handle, 32)
    expected = legs.plain(deployment, prompt, 32)
    later = legs.decode_alone(deployment, prompt, 32)
    return f"{equal(text, expected)}; later from decode's cache: {equal(later, expected)}"


def finished(deployment: Deployment, name: str) -> tuple[str, dict[str, Any]]:
    history = user_text(name, 400)
    answer, _, handle = legs.turn(deployment, history)
    return history + answer + " go on", handle


def with_handle(deployment: Deployment, prompt: str, handle: dict[str, Any]) -> str:
    before = external(deployment)

    def ask() -> httpx.Response:
        return legs.completion(deployment, deployment.prefill_url, prompt, 1, handle)

    seen = after(deployment, deployment.prefill_url, ask)
    if seen.startswith("HTTP 200"):
        seen += f", {external(deployment) - before:g} tokens read"
    waiting = legs.metric(
        deployment, deployment.prefill_url, "vllm:num_requests_waiting_by_reason", reason="deferred"
    )
    return seen + (f"; {waiting:g} requests wait for ever" if waiting else "")


def external(deployment: Deployment) -> float:
    return legs.metric(
        deployment,
        deployment.prefill_url,
        contract.ENGINE_PROMPT_TOKENS_BY_SOURCE,
        source=contract.SOURCE_EXTERNAL_KV,
    )


def expired_handle(deployment: Deployment) -> str:
    prompt, handle = finished(deployment, f"expired {time.monotonic()}")
    handle |= {contract.REMOTE_EXPIRY: 1.0}
    return with_handle(deployment, prompt, handle)


def wrong_port(deployment: Deployment) -> str:
    prompt, handle = finished(deployment, f"port {time.monotonic()}")
    handle |= {contract.REMOTE_PORT: 1, contract.REMOTE_ENGINE_ID: "nobody"}
    return with_handle(deployment, prompt, handle)


def used_twice(deployment: Deployment) -> str:
    prompt, handle = finished(deployment, "twice")
    with_handle(deployment, prompt, handle)
    return with_handle(deployment, prompt, handle)


def forged_blocks(deployment: Deployment) -> str:
    prompt, handle = finished(deployment, "forged")
    handle[contract.REMOTE_BLOCK_IDS] = [[1, 2, 3, 4][: len(handle[contract.REMOTE_BLOCK_IDS][0])]]
    return with_handle(deployment, prompt, handle)


def out_of_range(deployment: Deployment) -> str:
    prompt, handle = finished(deployment, "range")
    ids = handle[contract.REMOTE_BLOCK_IDS][0]
    handle[contract.REMOTE_BLOCK_IDS] = [[10**6 + n for n in range(len(ids))]]
    return with_handle(deployment, prompt, handle)


def payload(leg: str, params: Any, **more: Any) -> Fault:
    def fault(deployment: Deployment) -> str:
        url = getattr(deployment, f"{leg}_url")

        def ask() -> httpx.Response:
            return legs.completion(deployment, url, "hello there", 2, params, **more)

        return after(deployment, url, ask)

    return fault


def unfreed(deployment: Deployment) -> str:
    """Blocks that are still taken when every lease of decode is over."""
    usage = "vllm:kv_cache_usage_perc"
    seen = payload("decode", {"foo": 1})(deployment)
    time.sleep(DECODE_TTL + 3)
    healthy(deployment, deployment.decode_url)
    time.sleep(1)
    left = legs.metric(deployment, deployment.decode_url, usage)
    return seen + f"; KV use {DECODE_TTL} s TTL later: {left:.4f}"


def garbage_on_side_channel(deployment: Deployment) -> str:
    port = deployment.spec["decode"]["legs"][0]["side_channel_port"]
    legs.side_channel(port, b"\x93\xacget_meta_msg\x07\x07")
    answers = legs.handshake(port)
    fine = deployment.client.get(f"{deployment.decode_url}/health").status_code
    said = "answers" if answers else "never answers again"
    return f"the next handshake {said}, /health says {fine}"


def stream_without_handle(deployment: Deployment) -> str:
    prompt, _ = finished(deployment, "stream")
    ask = {contract.DO_REMOTE_DECODE: False}
    answer = legs.completion(deployment, deployment.decode_url, prompt, 2, ask, stream=True)
    carries = contract.KV_TRANSFER_PARAMS in answer.text
    return "carries a handle" if carries else "carries no handle"


def idle_with_a_kept_turn(deployment: Deployment) -> str:
    """CPU of a decode leg that has nothing to do, with and without a turn that it keeps."""
    leader = deployment.status()["decode-0"]["pid"]
    time.sleep(DECODE_TTL + 2)
    without = used_cores(leader)
    finished(deployment, f"idle {time.monotonic()}")
    kept = used_cores(leader)
    return f"{kept:.2f} of a core, {without:.2f} without a turn"


def used_cores(leader: int, seconds: float = 5) -> float:
    """Cores that a leg's session uses, once its worker has stopped spinning after a step."""
    time.sleep(2)
    before = cpu_seconds(leader)
    time.sleep(seconds)
    return (cpu_seconds(leader) - before) / seconds


def handle_to_the_unwilling(deployment: Deployment) -> str:
    return with_handle(deployment, *finished(deployment, "unwilling"))


def honest_with_bpe(deployment: Deployment) -> str:
    """Generated text is split into other tokens than it was generated as."""
    history = user_text("drift", 800)
    answer, _, handle = legs.turn(deployment, history, tokens=32)
    prompt = history + answer + " and then?"
    text, _, _ = legs.turn(deployment, prompt, handle, 32)
    expected = legs.plain(deployment, prompt, 32)
    same = sum(a == b for a, b in zip(text, expected, strict=False))
    return f"{same} of {len(expected)} characters right"


SMUGGLED = {"vllm_xargs": {contract.KV_TRANSFER_PARAMS: "boom"}}
READS = {contract.DO_REMOTE_PREFILL: True}
BOOM = {
    **legs.ASK,
    contract.REMOTE_BLOCK_IDS: [[1]],
    contract.REMOTE_ENGINE_ID: "e",
    contract.REMOTE_REQUEST_ID: "r",
    contract.REMOTE_HOST: "127.0.0.1",
    contract.REMOTE_PORT: 1,
    contract.REMOTE_NUM_TOKENS: "boom",
}
NO_ADDRESS = {**READS, contract.REMOTE_BLOCK_IDS: [[1]]}


def refused_for_another_reason(deployment: Deployment) -> str:
    """vLLM tells the connector of a request that it refuses itself."""

    def ask() -> httpx.Response:
        return legs.completion(deployment, deployment.decode_url, "x" * 9000, 2, READS)

    return after(deployment, deployment.decode_url, ask)


def same_engine_id_again(deployment: Deployment) -> str:
    """Decode restarts under the engine id that prefill knows."""
    with_handle(deployment, *finished(deployment, "before"))
    stop_changed()
    start_changed(deployment, "decode", {})
    return with_handle(deployment, *finished_alone(deployment))


def finished_alone(deployment: Deployment) -> tuple[str, dict[str, Any]]:
    history = user_text("after", 400)
    ask = {contract.DO_REMOTE_DECODE: False}
    done = legs.completion(deployment, deployment.decode_url, history, 16, ask)
    return history + legs.text_of(done) + " go on", legs.params_of(done)


STAGES: list[tuple[dict[str, Any], list[Row]]] = [
    (
        {},
        [
            ("edited history with the old handle", edited_history),
            ("expired handle (policy as the spec's auto)", expired_handle),
            ("handle with a wrong port", wrong_port),
            ("handle used a second time", used_twice),
            ("handle with another's block ids", forged_blocks),
            ("handle with block ids out of range", out_of_range),
            ("streamed answer of decode", stream_without_handle),
            ('{"foo": 1} to decode', unfreed),
            ("idle decode that keeps a turn", idle_with_a_kept_turn),
            ("unknown rank on decode's side channel", garbage_on_side_channel),
            ("do_remote_prefill without blocks to decode", payload("decode", READS), "decode"),
            ('remote_num_tokens "boom" to prefill', payload("prefill", BOOM), "prefill"),
            (
                "parameters in vllm_xargs to prefill",
                payload("prefill", None, **SMUGGLED),
                "prefill",
            ),
            (
                "do_remote_prefill in a refused request to decode",
                refused_for_another_reason,
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
        [("expired handle, policy recompute", expired_handle)],
    ),
    (
        {"leg": "decode", "script": {r"(?m)^nonce=.*$": "nonce=0123456789ab"}},
        [("decode restarted under its old engine id", same_engine_id_again)],
    ),
    (
        {"model": str(BPE)},
        [("honest second turn, BPE tokenizer", honest_with_bpe)],
    ),
    (
        {"leg": "prefill", "script": {'_kv_xfer":true': '_kv_xfer":false'}},
        [
            ("handle to a prefill with bidirectional off", handle_to_the_unwilling),
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
