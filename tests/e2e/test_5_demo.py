"""pdctl demo on the real engine: what `make demo` shows is checked here, but for its times."""

import json

from .conftest import Deployment


def test_the_demo_reads_back_and_answers_alike(deployment: Deployment) -> None:
    deployment.pdctl("down", deployment.name)
    deployment.spec["kv_transfer"] |= {"connector": "pdctl", "decode_ttl": "300s"}
    deployment.spec["benchmark"] |= {"turns": 2, "first_turn_chars": 1500}
    deployment.write()
    shown = json.loads(deployment.pdctl("demo", "SPEC", "--json").stdout)
    assert shown["ok"], shown["problems"]
    turns = {(turn["bidirectional"], turn["turn"]): turn for turn in shown["turns"]}
    assert turns["on", 2]["outcome"] == "hit"
    assert turns["on", 2]["tokens_read_back"] >= 0.9 * turns["on", 1]["prompt_tokens"]
    assert turns["off", 2]["outcome"] == "disabled"
    assert turns["off", 2]["tokens_read_back"] == 0
    assert turns["on", 2]["answer"] == turns["off", 2]["answer"] == turns["off", 2]["plain_answer"]
    assert deployment.status() == {}
