"""The connector on the real engine: what is read is right, what is wrong is refused."""

import json
from typing import Any

import pytest

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome
from pdctl.conversation import user_text

from . import legs
from .conftest import Deployment
from .legs import completion, decode_alone, healthy, metric, plain, turn

pytestmark = pytest.mark.e2e_connector

BLOCK = 128


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def other(character: str) -> str:
    return "Z" if character != "Z" else "Y"


def edited(text: str, at: int) -> str:
    return text[:at] + other(text[at]) + text[at + 1 :]


def external(deployment: Deployment) -> float:
    return metric(
        deployment,
        deployment.prefill_url,
        contract.ENGINE_PROMPT_TOKENS_BY_SOURCE,
        source=contract.SOURCE_EXTERNAL_KV,
    )


# A turn of 4 whole blocks and a piece; where its copy is edited, and what can still be read.
CLIPS = [
    (None, 4 * BLOCK + 60 + 15),
    (4 * BLOCK + 40, 4 * BLOCK),
    (4 * BLOCK, 4 * BLOCK),
    (4 * BLOCK - 1, 3 * BLOCK),
    (2 * BLOCK + 5, 2 * BLOCK),
    (BLOCK, BLOCK),
    (BLOCK - 1, 0),
    (0, 0),
]


@pytest.mark.parametrize(("at", "readable"), CLIPS)
def test_what_is_read_ends_where_the_history_was_edited(
    deployment: Deployment, at: int | None, readable: int
) -> None:
    history = user_text(f"clip-{at}", 4 * BLOCK + 60)[: 4 * BLOCK + 60]
    answer, _, handle = turn(deployment, history)
    prompt = history + answer
    if at is not None:
        prompt = edited(prompt, at)
    prompt += " and then?"
    before = external(deployment)
    text, reuse, _ = turn(deployment, prompt, handle)
    expected = plain(deployment, prompt)
    assert text == expected
    assert reuse["tokens_read"] == readable == external(deployment) - before
    assert reuse["outcome"] == (Outcome.HIT if readable else Outcome.HISTORY_CHANGED).value
    if at is not None and readable:
        assert f"for {readable} of" in reuse["reason"]
    # Nor did decode's prefix cache keep anything wrong.
    assert decode_alone(deployment, prompt) == expected


@pytest.mark.parametrize("length", [4 * BLOCK + 30, 3 * BLOCK, 2 * BLOCK + 1])
def test_a_history_that_was_cut_is_read_as_far_as_it_goes(
    deployment: Deployment, length: int
) -> None:
    history = user_text(f"cut-{length}", 4 * BLOCK + 60)[: 4 * BLOCK + 60]
    _, _, handle = turn(deployment, history)
    prompt = history[:length]
    text, reuse, _ = turn(deployment, prompt, handle)
    assert text == plain(deployment, prompt) == decode_alone(deployment, prompt)
    assert reuse["tokens_read"] == length // BLOCK * BLOCK


def test_another_prompts_prefill_is_not_taken_by_decode(deployment: Deployment) -> None:
    first, second = (user_text(f"mixed-{n}", 300)[:300] for n in (1, 2))
    handle = legs.params_of(completion(deployment, deployment.prefill_url, first, 1, legs.ASK))
    mixed = completion(deployment, deployment.decode_url, second, 16, handle)
    assert legs.text_of(mixed) == plain(deployment, second)


def test_a_handle_is_read_once(deployment: Deployment) -> None:
    history = user_text("once", 300)
    answer, _, handle = turn(deployment, history)
    prompt = history + answer + " go on"
    _, first, _ = turn(deployment, prompt, handle)
    before = refused(deployment, "used")
    text, second, _ = turn(deployment, prompt, handle)
    assert (first["outcome"], second["outcome"]) == (Outcome.HIT.value, Outcome.FAILED.value)
    assert second["reason"] == "used"
    assert refused(deployment, "used") == before + 1
    assert text == plain(deployment, prompt)


def test_two_answers_to_one_prompt_read_prefills_blocks_once(deployment: Deployment) -> None:
    prompt = user_text("two answers", 300)
    handle = legs.params_of(completion(deployment, deployment.prefill_url, prompt, 1, legs.ASK))
    before = refused(deployment, "used", deployment.decode_url)
    both = completion(
        deployment, deployment.decode_url, prompt, 16, handle, n=2, temperature=1, top_k=1
    )
    assert both.status_code == 200
    expected = plain(deployment, prompt)
    assert [choice["text"] for choice in both.json()["choices"]] == [expected, expected]
    assert refused(deployment, "used", deployment.decode_url) == before + 1


def refused(deployment: Deployment, reason: str, url: str | None = None) -> float:
    return metric(
        deployment, url or deployment.prefill_url, telemetry.ENGINE_REFUSED.name, reason=reason
    )


FORGERIES: list[tuple[str, dict[str, Any], str]] = [
    ("other blocks", {contract.REMOTE_BLOCK_IDS: [[1, 2, 3]]}, "altered"),
    ("another host", {contract.REMOTE_HOST: "127.0.0.2"}, "altered"),
    ("another request", {contract.REMOTE_REQUEST_ID: "cmpl-x"}, "altered"),
    ("a longer life", {contract.REMOTE_EXPIRY: 1e9}, "altered"),
    ("no signature", {contract.PD_SIGNATURE: None}, "unsigned"),
    ("no claim", {contract.PD_LEASE: None}, "altered"),
    ("another deployment's", {contract.PD_SIGNATURE: f"1.00000000.{'A' * 24}"}, "foreign"),
    ("nonsense", {contract.PD_SIGNATURE: "letmein"}, "forged"),
]


@pytest.mark.parametrize(("what", "change", "reason"), FORGERIES)
def test_a_forged_handle_is_refused_by_prefill(
    deployment: Deployment, what: str, change: dict[str, Any], reason: str
) -> None:
    history = user_text(what, 300)
    answer, _, handle = turn(deployment, history)
    prompt = history + answer + " go on"
    before = refused(deployment, reason)
    text, reuse, _ = turn(deployment, prompt, handle | change)
    assert text == plain(deployment, prompt)
    assert (reuse["outcome"], reuse["tokens_read"]) == (Outcome.FAILED.value, 0)
    assert reuse["reason"] == reason
    assert refused(deployment, reason) == before + 1


def test_a_forged_handle_is_refused_by_decode(deployment: Deployment) -> None:
    prompt = user_text("forged for decode", 300)
    handle = legs.params_of(completion(deployment, deployment.prefill_url, prompt, 1, legs.ASK))
    handle[contract.REMOTE_BLOCK_IDS] = [[1, 2, 3]]
    before = refused(deployment, "altered", deployment.decode_url)
    answer = completion(deployment, deployment.decode_url, prompt, 16, handle)
    assert legs.text_of(answer) == plain(deployment, prompt)
    assert refused(deployment, "altered", deployment.decode_url) == before + 1


BLOCKS = {
    contract.REMOTE_BLOCK_IDS: [[1]],
    contract.REMOTE_ENGINE_ID: "e",
    contract.REMOTE_REQUEST_ID: "r",
    contract.REMOTE_HOST: "127.0.0.1",
    contract.REMOTE_PORT: 1,
}
PAYLOADS: list[tuple[Any, str]] = [
    ({contract.DO_REMOTE_PREFILL: True}, "missing"),
    ({contract.DO_REMOTE_PREFILL: True, contract.REMOTE_BLOCK_IDS: [[1]]}, "missing"),
    ({**legs.ASK, **BLOCKS, contract.REMOTE_NUM_TOKENS: "boom"}, "wrong_type"),
    ({**legs.ASK, **BLOCKS, contract.REMOTE_BLOCK_IDS: [["1"]]}, "wrong_type"),
    ({**legs.ASK, **BLOCKS, contract.REMOTE_BLOCK_IDS: "123"}, "wrong_type"),
    ({**legs.ASK, **BLOCKS, contract.REMOTE_BLOCK_IDS: [[-1]]}, "out_of_range"),
    ({**legs.ASK, **BLOCKS, contract.REMOTE_BLOCK_IDS: [[2**40]]}, "out_of_range"),
    ({**legs.ASK, **BLOCKS, contract.REMOTE_PORT: 0}, "out_of_range"),
    ({**legs.ASK, **BLOCKS, "tp_size": "x"}, "wrong_type"),
    ({"foo": 1}, "unknown_key"),
    ({**legs.ASK, "_remote_blocks_processed": True}, "unknown_key"),
    ({contract.REMOTE_NUM_TOKENS: 5}, "missing"),
    ({contract.DO_REMOTE_PREFILL: True, contract.DO_REMOTE_DECODE: True, **BLOCKS}, "both"),
]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_what_must_not_reach_the_scheduler_gets_400(deployment: Deployment, leg: str) -> None:
    url = getattr(deployment, f"{leg}_url")
    name = telemetry.ENGINE_REJECTED.name
    for payload, reason in PAYLOADS:
        before = metric(deployment, url, name, reason=reason)
        for stream in (False, True):
            answer = completion(deployment, url, "hello", 1, payload, stream=stream)
            assert answer.status_code == 400, (payload, answer.text)
            assert contract.KV_TRANSFER_PARAMS in answer.json()["error"]["message"]
        assert metric(deployment, url, name, reason=reason) == before + 2, payload
    assert healthy(deployment, url)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_other_ways_to_pass_them_are_closed_too(deployment: Deployment, leg: str) -> None:
    url = getattr(deployment, f"{leg}_url")
    for smuggled in ("boom", [1]):
        answer = completion(
            deployment, url, "hello", 1, vllm_xargs={"kv_transfer_params": smuggled}
        )
        assert answer.status_code == 400, answer.text
    # vLLM tells the connector of a request that it refuses for another reason.
    bad = {contract.DO_REMOTE_PREFILL: True}
    answer = completion(deployment, url, "hello", -1, bad)
    assert answer.status_code == 400
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ("/v1/messages", chat),
    ):
        whole = body | {"model": deployment.model, contract.KV_TRANSFER_PARAMS: bad}
        assert deployment.client.post(f"{url}{path}", json=whole).status_code == 400, path
    assert healthy(deployment, url)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_the_side_channel_survives_what_is_no_handshake(deployment: Deployment, leg: str) -> None:
    port = deployment.spec[leg]["legs"][0]["side_channel_port"]
    unknown_rank = b"\x93\xacget_meta_msg\x07\x07"
    legs.side_channel(port, unknown_rank, b"", b"garbage", b"\xc1", b"\x93\x01\x02\x03", b"\x90")
    assert legs.handshake(port)
    assert not deployment.log(f"{leg}-0").count("Exception in thread nixl_handshake_listener")


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_leg_tells_its_settings(deployment: Deployment, leg: str) -> None:
    url = getattr(deployment, f"{leg}_url")
    found = legs.settings(deployment, url)
    kv = deployment.spec["kv_transfer"]
    assert found["role"] == leg
    assert found["bidirectional"] is True
    assert found["readback"] is True
    assert found["recompute_threshold"] == kv["recompute_threshold"]
    assert found["decode_ttl"] == 300
    assert found["load_failure_policy"] == "recompute"
    assert found["connector"] == "pdctl"
    assert found["signed"] is True
    assert found["params_checked"] is True
    assert (found["backends"], found["provider"]) == (["UCX"], "sockets")
    assert found["block_size"] == BLOCK
    assert found["num_blocks"] > 0
    assert found["engine_id"].startswith(f"{deployment.name}-{leg}-0-")
    assert metric(deployment, url, telemetry.ENGINE_INFO.name, role=leg) == 1
    secret = (deployment.folder / "state" / deployment.name / "secret").read_text()
    assert secret not in deployment.log(f"{leg}-0") + str(found)
    assert "signed=on" in deployment.log(f"{leg}-0")
    line = next(x for x in deployment.log(f"{leg}-0").splitlines() if contract.LOG_SETTINGS in x)
    assert json.loads(line.partition(f"{contract.LOG_SETTINGS}: ")[2]) == found


@pytest.mark.parametrize(
    ("leg", "metrics"),
    [
        ("prefill", [telemetry.ENGINE_DECISIONS, telemetry.ENGINE_TOKENS]),
        ("decode", [telemetry.ENGINE_PINS_ENDED]),
    ],
)
def test_counters_are_there_before_their_first_event(
    deployment: Deployment, leg: str, metrics: list[telemetry.Metric]
) -> None:
    url = getattr(deployment, f"{leg}_url")
    shown = deployment.client.get(f"{url}/metrics").text
    for each in (*metrics, telemetry.ENGINE_REFUSED, telemetry.ENGINE_REJECTED):
        (label,), (values,) = each.labels, each.values
        for value in values:
            assert f'{each.name}{{{label}="{value}"}}' in shown
    assert f"{telemetry.ENGINE_SPANS_DROPPED.name} 0.0" in shown
