"""Decode's side of prefill's answer: taken when it was not read before and is for this prompt."""

from collections.abc import Callable, Sequence
from typing import Any

from pd_connector.admit import Gate
from pd_connector.contract import PD_TOKENS
from pd_connector.identity import Identity
from pd_connector.proof import packed
from pd_connector.readback import tokens_held


class Handovers:
    """The requests of one engine that come with prefill's blocks, each compared once."""

    def __init__(self, gate: Gate, identity: Identity, tokens_needed: Callable[[int], int]) -> None:
        """``tokens_needed``: of a prompt's tokens those that prefill's blocks have to hold."""
        self._gate = gate
        self._identity = identity
        self._tokens_needed = tokens_needed
        self._refused: dict[str, bool] = {}
        self._prompts: dict[str, Sequence[int]] = {}

    def refused(self, request: Any) -> bool:
        """Whether prefill's blocks were read before, or hold another prompt, as far as prefill
        says which."""
        known = self._refused.get(request.request_id)
        if known is None:
            known = self._refused[request.request_id] = self._refuse(request)
        return known

    def over(self, request_id: str) -> Sequence[int] | None:
        """Forget a request; its prompt's token ids, packed, if they were compared."""
        self._refused.pop(request_id, None)
        return self._prompts.pop(request_id, None)

    def _refuse(self, request: Any) -> bool:
        handle = request.kv_transfer_params
        if self._gate.was_used(handle):
            self._gate.disarm(request, "used")
            return True
        if PD_TOKENS not in handle:
            return False
        ids = self._prompts[request.request_id] = packed(request.prompt_token_ids or ())
        proven = self._identity.proven(request, handle, tokens_held(handle), ids)
        if proven >= self._tokens_needed(request.num_prompt_tokens):
            return False
        self._gate.refused(request, "another_prompt", "prefill computed another prompt")
        return True
