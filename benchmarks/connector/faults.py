"""What is done to a pair to see what goes wrong: each tells in a few words what it saw."""

import time
from collections.abc import Callable
from typing import Any

import httpx
from tests.e2e import legs
from tests.e2e.conftest import Deployment

from pd_connector import contract
from pdctl.conversation import user_text

from .broken_pair import HANGS, healthy, start_changed, stop_changed
from .legcpu import cpu_seconds

DECODE_TTL = 20
Fault = Callable[[Deployment], str]


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
