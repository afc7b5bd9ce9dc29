"""A tokenizer that splits generated text differently than it was generated."""

import subprocess
from collections.abc import Iterator

import pytest

from pd_connector import contract
from pd_connector.contract import Outcome
from pdctl.conversation import user_text

from .conftest import CANARY, PDCTL, Deployment
from .legs import decode_alone, plain, turn

pytestmark = pytest.mark.e2e_connector

BPE = CANARY.with_name("canary-bpe")
BLOCK = 128


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> Iterator[None]:
    if not (BPE / "config.json").is_file():
        subprocess.run([str(PDCTL), "canary", "--tokenizer", "bpe", str(BPE)], check=True)
    usual = dict(deployment.spec["model"])
    deployment.spec["model"]["id"] = str(BPE)
    deployment.spec["kv_transfer"] |= {"connector": "pdctl", "decode_ttl": "300s"}
    deployment.spec["router"]["handle_ttl"] = "290s"
    deployment.write()
    deployment.pdctl("up", "SPEC", "--bidir", "on")
    yield
    deployment.spec["model"] = usual


def test_an_honest_turn_is_read_up_to_where_its_tokens_differ(deployment: Deployment) -> None:
    history = user_text("drift", 800)
    answer, _, handle = turn(deployment, history, tokens=32)
    held = handle[contract.REMOTE_NUM_TOKENS]
    prompt = history + answer + " and then?"
    text, reuse, _ = turn(deployment, prompt, handle, 32)
    expected = plain(deployment, prompt, 32)
    assert text == expected
    assert decode_alone(deployment, prompt, 32) == expected
    assert reuse["outcome"] == Outcome.HIT.value
    # The history's whole blocks are read, the answer's tokens are not the prompt's.
    assert reuse["tokens_read"] == (held - 31) // BLOCK * BLOCK
    assert f"of {held} tokens" in reuse["reason"]
