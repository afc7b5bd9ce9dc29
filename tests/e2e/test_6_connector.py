"""What the connector tells of every prompt: the answer, the span, its own metrics and vLLM's
counters agree, and the text is the plain one. Then leases, on the same pair of engines."""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome
from pdctl.conversation import user_text
from tests.otlp import Receiver
from tests.waiting import until

from .conftest import Deployment

pytestmark = pytest.mark.e2e_connector

TOKENS = 16
ALONE = {contract.DO_REMOTE_DECODE: False, contract.DO_REMOTE_PREFILL: False}
"""Decode computes the prompt itself and keeps the turn."""
FRESH = {contract.DO_REMOTE_DECODE: True, contract.DO_REMOTE_PREFILL: False}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def pair(deployment: Deployment, receiver: Receiver) -> Iterator["Pair"]:
    """Prefill with a prefix cache of its own, both engines traced, decode with little memory."""
    spec = deployment.spec
    kept = {key: spec.get(key) for key in ("observability", "prefill", "engine", "kv_transfer")}
    spec["observability"] = {**spec["observability"], "otlp_endpoint": receiver.endpoint}
    spec["prefill"] = {**spec["prefill"], "prefix_caching": True}
    spec["kv_transfer"] = {**spec["kv_transfer"], "decode_ttl": "300s"}
    env = {
        **spec["engine"]["env"],
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "VLLM_PLUGINS": "pd_connector",
    }
    args = {**spec["engine"]["extra_args"], "decode": ["--num-gpu-blocks-override", "96"]}
    spec["engine"] = {**spec["engine"], "env": env, "extra_args": args}
    deployment.write()
    deployment.pdctl("up", "SPEC", "--bidir", "on")
    yield Pair(deployment, receiver)
    spec.update(kept)
    deployment.write()


class Turn:
    """A prompt's answer on prefill and all that was told of it."""

    def __init__(self, answer: dict[str, Any], trace_id: str, parent_id: str) -> None:
        self.text = answer["choices"][0]["text"]
        self.params = answer[contract.KV_TRANSFER_PARAMS]
        self.reuse = self.params[contract.PD_REUSE]
        self.trace_id, self.parent_id = trace_id, parent_id


class Pair:
    def __init__(self, deployment: Deployment, receiver: Receiver) -> None:
        self.deployment = deployment
        self.receiver = receiver
        self.client = httpx.Client(timeout=60, trust_env=False)

    def post(self, url: str, params: Any, prompt: str, tokens: int, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        body = {"model": "canary", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= more | ({contract.KV_TRANSFER_PARAMS: params} if params is not None else {})
        response = self.client.post(f"{url}/v1/completions", json=body, headers=headers)
        response.raise_for_status()
        return response

    def kept_turn(self, prompt: str) -> tuple[str, dict[str, Any]]:
        """A turn that decode alone has computed and keeps: its text and its handle."""
        answer = self.post(self.deployment.decode_url, ALONE, prompt, TOKENS).json()
        return prompt + answer["choices"][0]["text"], answer[contract.KV_TRANSFER_PARAMS]

    def prefill(self, prompt: str, params: dict[str, Any]) -> Turn:
        trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
        headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
        answer = self.post(self.deployment.prefill_url, params, prompt, 1, headers=headers).json()
        return Turn(answer, trace_id, parent_id)

    def decode(self, prompt: str, turn: Turn, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.post(
            self.deployment.decode_url, turn.params, prompt, TOKENS, **more
        ).json()
        return answer

    def plain(self, prompt: str) -> str:
        """Prefill's own answer, its prefix cache kept out by a salt."""
        answer = self.post(
            self.deployment.prefill_url, None, prompt, TOKENS, cache_salt=secrets.token_hex(4)
        )
        text: str = answer.json()["choices"][0]["text"]
        return text

    def metrics(self, url: str) -> Callable[..., float]:
        text = self.client.get(f"{url}/metrics").text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]

        def value(name: str, **labels: str) -> float:
            return sum(
                s.value
                for s in samples
                if s.name == name and labels.items() <= {**s.labels}.items()
            )

        return value

    def leases(self, **order: Any) -> dict[str, Any]:
        url = f"{self.deployment.decode_url}{contract.ENGINE_LEASES_PATH}"
        response = self.client.post(url, json=order) if order else self.client.get(url)
        response.raise_for_status()
        body: dict[str, Any] = response.json()
        return body

    def decode_pid(self) -> int:
        pid: int = self.deployment.status()["decode-0"]["pid"]
        return pid


def changed(text: str) -> str:
    return ("Z" if text[0] != "Z" else "Y") + text[1:]


def hit(pair: Pair) -> tuple[str, dict[str, Any]]:
    text, handle = pair.kept_turn(user_text(secrets.token_hex(4), 900))
    return text + " and so on", handle


def local_hit(pair: Pair) -> tuple[str, dict[str, Any]]:
    text, handle = pair.kept_turn(user_text(secrets.token_hex(4), 900))
    pair.post(pair.deployment.prefill_url, None, text + " and so on", 1)
    return text + " and so on", handle


def miss(pair: Pair) -> tuple[str, dict[str, Any]]:
    return user_text(secrets.token_hex(4), 900), FRESH


def below_threshold(pair: Pair) -> tuple[str, dict[str, Any]]:
    text, handle = pair.kept_turn(user_text(secrets.token_hex(4), 20)[:20])
    return text + " and so on", handle


def expired(pair: Pair) -> tuple[str, dict[str, Any]]:
    prompt, handle = hit(pair)
    turn = handle[contract.REMOTE_REQUEST_ID]
    assert pair.leases(release=[turn])["released"] == [turn]
    return prompt, handle


def history_changed(pair: Pair) -> tuple[str, dict[str, Any]]:
    prompt, handle = hit(pair)
    return changed(prompt), handle


def failed(pair: Pair) -> tuple[str, dict[str, Any]]:
    """Decode stands still: it does not answer the claim."""
    prompt, handle = hit(pair)
    os.killpg(pair.decode_pid(), signal.SIGSTOP)
    return prompt, handle


SITUATIONS = {
    Outcome.HIT: hit,
    Outcome.LOCAL_HIT: local_hit,
    Outcome.MISS: miss,
    Outcome.BELOW_THRESHOLD: below_threshold,
    Outcome.EXPIRED: expired,
    Outcome.HISTORY_CHANGED: history_changed,
    Outcome.FAILED: failed,
}


@pytest.mark.parametrize("outcome", SITUATIONS, ids=lambda outcome: outcome.value)
def test_all_that_is_told_agrees(pair: Pair, outcome: Outcome) -> None:
    prompt, params = SITUATIONS[outcome](pair)
    before = pair.metrics(pair.deployment.prefill_url)
    try:
        turn = pair.prefill(prompt, params)
    finally:
        os.killpg(pair.decode_pid(), signal.SIGCONT)
    check(pair, outcome, prompt, turn, before)
    assert pair.decode(prompt, turn)["choices"][0]["text"] == pair.plain(prompt)


def check(
    pair: Pair, outcome: Outcome, prompt: str, turn: Turn, before: Callable[..., float]
) -> None:
    assert turn.reuse["outcome"] == outcome.value, turn.reuse
    url = pair.deployment.prefill_url

    def gained(metric: telemetry.Metric, **labels: str) -> float:
        return pair.metrics(url)(metric.name, **labels) - before(metric.name, **labels)

    decisions = telemetry.ENGINE_DECISIONS
    until("the decision is counted", lambda: gained(decisions, outcome=outcome.value) == 1)
    assert gained(decisions) == 1
    assert gained(telemetry.ENGINE_DECLINED) == (outcome is Outcome.EXPIRED)

    until("the span arrives", lambda: pair.receiver.of("pd.decision", turn.trace_id))
    (span,) = pair.receiver.of("pd.decision", turn.trace_id)
    assert span.parent_id == turn.parent_id
    assert span.attributes["pd.outcome"] == outcome.value
    declined = (telemetry.EVENT_DECLINED,) if outcome is Outcome.EXPIRED else ()
    assert span.events == declined

    after = pair.metrics(url)
    for kind, attribute, source in (
        ("read", "pd.tokens.read", contract.SOURCE_EXTERNAL_KV),
        ("computed", "pd.tokens.computed", contract.SOURCE_LOCAL_COMPUTE),
        ("local", "pd.tokens.local", contract.SOURCE_LOCAL_CACHE),
    ):
        counted = gained(telemetry.ENGINE_TOKENS, kind=kind)
        name = contract.ENGINE_PROMPT_TOKENS_BY_SOURCE
        engines = after(name, source=source) - before(name, source=source)
        assert counted == span.attributes[attribute] == engines, kind
    assert gained(telemetry.ENGINE_TOKENS, kind="asked") == span.attributes["pd.tokens.offered"]
    read = gained(telemetry.ENGINE_TOKENS, kind="read")
    assert turn.reuse["tokens_read"] == read
    assert (read > 0) == (outcome is Outcome.HIT)

    transfers = pair.receiver.of("pd.transfer", turn.trace_id)
    name = telemetry.ENGINE_TRANSFER_BYTES.name
    told = after(f"{name}_sum", direction="d2p") - before(f"{name}_sum", direction="d2p")
    engines = after(contract.ENGINE_NIXL_BYTES) - before(contract.ENGINE_NIXL_BYTES)
    assert told == engines == sum(t.attributes["pd.bytes"] for t in transfers)
    assert turn.reuse.get("read_bytes", 0) == told
    assert bool(transfers) == (outcome is Outcome.HIT)
    for transfer in transfers:
        assert transfer.parent_id == turn.parent_id
        assert transfer.attributes["pd.direction"] == "d2p"
        assert transfer.attributes["pd.backend"] == "UCX"
        assert transfer.attributes["pd.peer"] == f"{pair.deployment.name}-decode-0"
        assert transfer.attributes["pd.descriptors"] > 0
        assert turn.reuse["read_ms"] == pytest.approx(transfer.seconds * 1e3, abs=0.01)


def test_the_way_to_decode_is_told_too(pair: Pair) -> None:
    prompt = user_text(secrets.token_hex(4), 900)
    turn = pair.prefill(prompt, FRESH)
    before = pair.metrics(pair.deployment.decode_url)
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    pair.decode(prompt, turn, headers={"traceparent": f"00-{trace_id}-{parent_id}-01"})
    until("the span arrives", lambda: pair.receiver.of("pd.transfer", trace_id))
    (span,) = pair.receiver.of("pd.transfer", trace_id)
    assert span.parent_id == parent_id
    assert span.attributes["pd.direction"] == "p2d"
    assert span.attributes["pd.peer"] == f"{pair.deployment.name}-prefill-0"
    name = f"{telemetry.ENGINE_TRANSFER_BYTES.name}_sum"
    after = pair.metrics(pair.deployment.decode_url)
    told = after(name, direction="p2d") - before(name, direction="p2d")
    assert told == span.attributes["pd.bytes"] > 0


def pinned(pair: Pair) -> set[str]:
    return {turn["id"] for turn in pair.leases()["turns"]}


def test_a_released_turn_frees_its_blocks_at_once(pair: Pair) -> None:
    pair.leases(release=sorted(pinned(pair)))
    usage = "vllm:kv_cache_usage_perc"
    until("nothing is kept", lambda: pair.metrics(pair.deployment.decode_url)(usage) == 0)
    ids = [hit(pair)[1][contract.REMOTE_REQUEST_ID] for _ in range(3)]
    assert pinned(pair) == set(ids)
    url = pair.deployment.decode_url
    until("they are counted", lambda: pair.metrics(url)(telemetry.ENGINE_PINS.name) == 3)
    assert pair.metrics(url)(telemetry.ENGINE_PINNED_BLOCKS.name) > 0
    before = pair.metrics(url)(telemetry.ENGINE_PINS_ENDED.name, reason="released")
    answer = pair.leases(release=[*ids, "nobody"])
    assert sorted(answer["released"]) == sorted(ids)
    assert answer["unknown"] == ["nobody"]
    until("usage is back at its idle level", lambda: pair.metrics(url)(usage) == 0)
    until("the gauge too", lambda: pair.metrics(url)(telemetry.ENGINE_PINS.name) == 0)
    assert pair.metrics(url)(telemetry.ENGINE_PINS_ENDED.name, reason="released") == before + 3
    again = pair.leases(release=ids)
    assert again["released"] == [] and sorted(again["unknown"]) == sorted(ids)


def test_a_renewed_turn_lives_longer(pair: Pair) -> None:
    prompt, handle = hit(pair)
    turn = handle[contract.REMOTE_REQUEST_ID]
    left = pair.leases(renew={turn: 2000, "nobody": 5})
    assert left["renewed"][turn] > 1990 and left["unknown"] == ["nobody"]
    # Never shortened.
    assert pair.leases(renew={turn: 1})["renewed"][turn] > 1990
    assert pair.prefill(prompt, handle).reuse["outcome"] == Outcome.HIT.value
    until("the read has freed it", lambda: turn not in pinned(pair))


def test_the_next_turn_frees_the_one_before(pair: Pair) -> None:
    """A turn that prefill could not read back is not kept beside its successor."""
    text, handle = pair.kept_turn(user_text(secrets.token_hex(4), 900))
    first = handle[contract.REMOTE_REQUEST_ID]
    assert first in pinned(pair)
    answer = pair.post(
        pair.deployment.decode_url, {**ALONE, contract.PD_PREVIOUS: first}, text + " next", TOKENS
    ).json()
    second = answer[contract.KV_TRANSFER_PARAMS][contract.REMOTE_REQUEST_ID]
    until("the first is free", lambda: first not in pinned(pair))
    assert second in pinned(pair)


def test_kept_turns_make_room_for_requests(pair: Pair) -> None:
    """96 blocks, 0.8 of them for turns: the longest idle go, and nothing is preempted."""
    url = pair.deployment.decode_url
    before = pair.metrics(url)
    ids = [hit(pair)[1][contract.REMOTE_REQUEST_ID] for _ in range(14)]
    total = pair.leases()["blocks"]
    kept = pair.leases()
    assert kept["pinned_blocks"] <= 0.8 * total
    assert ids[-1] in {turn["id"] for turn in kept["turns"]}
    assert ids[0] not in {turn["id"] for turn in kept["turns"]}
    # More than what is free: waits for no deadline.
    long = user_text(secrets.token_hex(4), 7000)
    assert pair.post(url, None, long, 4).status_code == 200
    after = pair.metrics(url)
    ended = telemetry.ENGINE_PINS_ENDED.name
    assert after(ended, reason="high_water") > before(ended, reason="high_water")
    assert after("vllm:num_preemptions_total") == before("vllm:num_preemptions_total")


def test_an_idle_engine_with_kept_turns_rests(pair: Pair) -> None:
    hit(pair)
    ticks = os.sysconf("SC_CLK_TCK")

    def cpu() -> float:
        total = 0.0
        for pid in _session(pair.decode_pid()):
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
        return total

    started, used = time.monotonic(), cpu()
    until("two seconds have passed", lambda: time.monotonic() - started > 2, 30)
    share = (cpu() - used) / (time.monotonic() - started)
    print(f"decode with a kept turn uses {share:.2f} of a core")
    assert share < 0.5


def _session(leader: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.getsid(int(name)) == leader:
                found.append(int(name))
        except ProcessLookupError:
            continue
    return found
