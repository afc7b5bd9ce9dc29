"""Decode takes prefill's blocks once, and only for the prompt that prefill computed."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pd_connector.admit import Gate
from pd_connector.contract import PD_TOKENS
from pd_connector.counters import Pending
from pd_connector.handover import Handovers
from pd_connector.identity import Identity
from pd_connector.telemetry import ENGINE_REFUSED

PROMPT = list(range(300))


class Decode:
    def __init__(self) -> None:
        self.pending = Pending()
        self.gate = Gate(None, frozenset(), 60.0, self.pending)
        self.identity = Identity(SimpleNamespace(model="m"), 16)
        self.handovers = Handovers(self.gate, self.identity, lambda tokens: tokens)

    def request(self, prompt: list[int], of: list[int] | None = None) -> Any:
        """With prefill's answer to the prompt ``of``, by default the same one."""
        request = SimpleNamespace(
            request_id="me",
            prompt_token_ids=prompt,
            num_prompt_tokens=len(prompt),
            prompt_embeds=None,
            lora_request=None,
            cache_salt=None,
            mm_features=[],
        )
        computed = SimpleNamespace(**{**vars(request), "prompt_token_ids": of or prompt})
        request.kv_transfer_params = {
            "do_remote_prefill": True,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": "prefill-0",
            "remote_request_id": "r",
            "remote_host": "h",
            "remote_port": 1,
            "remote_num_tokens": len(of or prompt),
            PD_TOKENS: self.identity.prompt_proof(computed, len(of or prompt), None),
        }
        return request

    def refusals(self) -> list[str]:
        return [row[1][0] for row in self.pending.take() if row[0] == ENGINE_REFUSED.name]


@pytest.fixture
def decode() -> Decode:
    return Decode()


def test_prefills_answer_to_the_same_prompt_is_taken(decode: Decode) -> None:
    assert not decode.handovers.refused(decode.request(PROMPT))
    assert list(decode.handovers.over("me") or ()) == PROMPT
    assert decode.handovers.over("me") is None
    assert decode.refusals() == []


def test_another_prompts_answer_is_refused_and_counted_once(decode: Decode) -> None:
    request = decode.request([7, *PROMPT[1:]], of=PROMPT)
    assert decode.handovers.refused(request) and decode.handovers.refused(request)
    assert decode.refusals() == ["another_prompt"]


def test_what_was_read_is_not_read_again(decode: Decode) -> None:
    request = decode.request(PROMPT)
    decode.gate.use(request.kv_transfer_params)
    assert decode.handovers.refused(request)
    assert decode.refusals() == ["used"]
    assert not request.kv_transfer_params["do_remote_prefill"]


def test_an_answer_that_says_no_tokens_is_taken_as_it_is(decode: Decode) -> None:
    request = decode.request(PROMPT)
    del request.kv_transfer_params[PD_TOKENS]
    assert not decode.handovers.refused(request)
    assert decode.handovers.over("me") is None
