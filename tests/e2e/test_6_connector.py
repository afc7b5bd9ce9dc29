"""What the connector tells of every prompt: the answer, the span, its own metrics and vLLM's
counters agree, and the text is the plain one. Then leases, on the same pair of engines."""

import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome
from pdctl.conversation import user_text
from tests.waiting import until

from .pair import ALONE, FRESH, TOKENS, Pair, Turn, pinned

pytestmark = pytest.mark.e2e_connector


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


def test_leases_are_for_who_has_the_key(pair: Pair) -> None:
    turn = hit(pair)[1][contract.REMOTE_REQUEST_ID]
    url = f"{pair.deployment.decode_url}{contract.ENGINE_LEASES_PATH}"
    assert pair.client.get(url).status_code == 401
    assert pair.client.post(url, json={"release": [turn]}).status_code == 401
    assert turn in pinned(pair)


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
    pair.leases(release=sorted(pinned(pair)))
    url = pair.deployment.decode_url
    until("nothing is kept", lambda: not pair.metrics(url)(telemetry.ENGINE_PINS.name))
    without = used_cores(pair.decode_pid())
    hit(pair)
    kept = used_cores(pair.decode_pid())
    print(f"decode uses {kept:.2f} of a core with a kept turn, {without:.2f} without one")
    assert kept < without + 0.4


def used_cores(leader: int, seconds: float = 5) -> float:
    """Cores that the processes of a leg use over a while, once its worker has stopped spinning,
    which it does for a second after each step."""

    def cpu() -> float:
        total = 0
        for pid in _session(leader):
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    step = time.monotonic()
    until("the worker rests", lambda: time.monotonic() - step > 1.5)
    started, before = time.monotonic(), cpu()
    until("the while is over", lambda: time.monotonic() - started > seconds)
    return (cpu() - before) / (time.monotonic() - started)


def _session(leader: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.getsid(int(name)) == leader:
                found.append(int(name))
        except ProcessLookupError:
            continue
    return found
