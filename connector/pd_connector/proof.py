"""The token proof: which tokens a handle's KV blocks hold.

A handle names blocks, not tokens, and equal messages need not be equal tokens: an
edited history, a chat template that drops reasoning or a tokenizer that splits the
generated text differently all change them. Decode puts a digest of the token ids
into its handle; prefill recomputes it over its own prompt before it reads a block.
"""

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

VERSION = 1
"""Version 1: BLAKE2b-128 over the seed's length (4 bytes, little endian), the seed,
and the token ids as little-endian uint32."""

Feature = tuple[int, int, str]
"""A multimodal item of a prompt: first token, length in tokens, content hash."""


def proof_seed(
    model: str,
    lora: str | None,
    cache_salt: str | None,
    features: Sequence[Feature],
) -> bytes:
    """What besides the token ids decides the KV of a prompt.

    The same things that vLLM mixes into the block hashes of its prefix cache.
    """
    return json.dumps([model, lora, cache_salt, features], separators=(",", ":")).encode()


def token_digest(seed: bytes, token_ids: Sequence[int]) -> str:
    """Digest of ``token_ids`` under ``seed``, 32 hex digits.

    Raises OverflowError for an id outside uint32.
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    state = blake2b(len(seed).to_bytes(4, "little"), digest_size=16)
    state.update(seed)
    state.update(ids)
    return state.hexdigest()


def make_proof(seed: bytes, token_ids: Sequence[int]) -> dict[str, Any]:
    """The proof field of a handle whose blocks hold exactly ``token_ids``."""
    try:
        digest = token_digest(seed, token_ids)
    except OverflowError:
        return unprovable(len(token_ids))
    return {"v": VERSION, "n": len(token_ids), "digest": digest}


def unprovable(num_tokens: int) -> dict[str, Any]:
    """The proof field of a handle whose tokens cannot be told; it matches no prompt."""
    return {"v": VERSION, "n": num_tokens, "digest": None}


def proof_matches(
    proof: object, num_tokens: int, seed: bytes, prompt_token_ids: Sequence[int]
) -> bool:
    """Whether the first ``num_tokens`` of a prompt are the tokens of a handle.

    ``num_tokens`` is the handle's own count; a proof for another count, of an
    unknown version or of a wrong shape does not match.
    """
    if not isinstance(proof, Mapping) or proof.get("v") != VERSION:
        return False
    if proof.get("n") != num_tokens or num_tokens > len(prompt_token_ids):
        return False
    try:
        return proof.get("digest") == token_digest(seed, prompt_token_ids[:num_tokens])
    except OverflowError:
        return False
