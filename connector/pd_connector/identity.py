"""What a vLLM request tells about the tokens of its prompt: seed, features, proof."""

from collections.abc import Mapping, Sequence
from typing import Any

from pd_connector.contract import PD_TOKENS
from pd_connector.proof import (
    Feature,
    continued,
    make_proof,
    proof_seed,
    tokens_proven,
    unprovable,
)


class Identity:
    """Proves and compares the tokens of a leg's requests."""

    def __init__(self, model_config: Any, block_size: int, key: bytes = b"") -> None:
        self._model = tuple(
            str(value) if (value := getattr(model_config, name, None)) is not None else None
            for name in ("model", "revision", "tokenizer", "tokenizer_revision")
        )
        self._block_size = block_size
        self._key = key

    def proof(
        self, request: Any, tokens: int, prompt_ids: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """The proof field over a request's first ``tokens`` tokens. ``prompt_ids``: the prompt's,
        packed, where they were compared before."""
        if prompt_ids is None or len(prompt_ids) > tokens:
            return self._make(request, request.all_token_ids[:tokens], False)
        answered = request.all_token_ids[len(prompt_ids) : tokens]
        return self._make(request, continued(prompt_ids, answered), False)

    def prompt_proof(
        self, request: Any, tokens: int, prompt_ids: Sequence[int] | None
    ) -> dict[str, Any]:
        """The proof field over all of a prompt but what is past ``tokens``."""
        ids = prompt_ids or request.prompt_token_ids or ()
        return self._make(request, ids[:tokens], True)

    def _make(self, request: Any, ids: Sequence[int], whole_only: bool) -> dict[str, Any]:
        tokens = len(ids)
        seed = self._seed(request)
        if seed is None:
            return unprovable(tokens, self._block_size)
        features = [item for item in _features(request) if item[0] < tokens]
        return make_proof(seed, ids, self._block_size, features, whole_only)

    def proven(
        self,
        request: Any,
        handle: Mapping[str, Any],
        tokens: int,
        prompt_ids: Sequence[int] | None = None,
    ) -> int:
        """How many first tokens of a request's prompt are proven to be the handle's, which
        holds ``tokens``; 0 of a leg that proves nothing. ``prompt_ids``: the prompt's, packed."""
        seed = self._seed(request)
        if seed is None:
            return 0
        ids = prompt_ids or request.prompt_token_ids
        features = [item for item in _features(request) if item[0] < tokens]
        return tokens_proven(handle.get(PD_TOKENS), tokens, seed, ids, features)

    def _seed(self, request: Any) -> bytes | None:
        """None when the token ids do not tell the inputs."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return None
        lora = request.lora_request
        name = lora.lora_name if lora is not None else None
        return proof_seed(self._model, name, request.cache_salt, self._key)


def _features(request: Any) -> list[Feature]:
    return [
        (item.mm_position.offset, item.mm_position.length, item.identifier)
        for item in request.mm_features
    ]
