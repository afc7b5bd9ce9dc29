"""What was generated is not what the next prompt has of it: another split, a part left out."""

import subprocess
from collections.abc import Iterator

import pytest

from pd_connector import contract
from pd_connector.contract import Outcome
from pdctl.conversation import user_text

from .conftest import CANARY, PDCTL, Conversation, Deployment
from .legs import decode_alone, plain, turn

pytestmark = pytest.mark.e2e_connector

BPE = CANARY.with_name("canary-bpe")
BLOCK = 128
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if message.role == 'user' else message.content[8:] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves the beginning of earlier answers out, as templates do with reasoning."""


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> Iterator[None]:
    if not (BPE / "config.json").is_file():
        subprocess.run([str(PDCTL), "canary", "--tokenizer", "bpe", str(BPE)], check=True)
    usual = dict(deployment.spec["model"])
    deployment.spec["model"]["id"] = str(BPE)
    deployment.spec["kv_transfer"] |= {"connector": "pdctl", "decode_ttl": "300s"}
    deployment.spec["router"]["handle_ttl"] = "290s"
    template = deployment.folder / "template.jinja"
    template.write_text(TEMPLATE)
    arguments = deployment.spec["engine"]["extra_args"]
    arguments["all"] = ["--chat-template", str(template)]
    deployment.write()
    deployment.pdctl("up", "SPEC", "--bidir", "on")
    yield
    deployment.spec["model"], arguments["all"] = usual, []


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


def test_dropped_reasoning_is_not_read(deployment: Deployment) -> None:
    chat = Conversation(deployment, characters=800)
    first = chat.say()
    assert first.prompt_tokens is not None
    second = chat.say()
    assert second.text == chat.plain()
    # Up to the answer, of which the template shows another part than was generated.
    assert second.outcome == Outcome.HIT.value
    assert second.tokens_read == first.prompt_tokens // BLOCK * BLOCK
