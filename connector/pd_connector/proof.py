"""The token proof: which tokens a handle's KV blocks hold.

A handle names blocks, not tokens, and equal messages need not be equal tokens: an
edited history, a chat template that drops reasoning or a tokenizer that splits the
generated text differently all change them. The leg that holds the blocks puts digests
of the token ids into its handle; the leg that would read them makes the same digests
of its own prompt first, and reads up to where they part.

Field, version 2: ``n`` tokens in blocks of ``b``; ``d`` has a digest of the first ``g``,
``2g``, ... tokens, 6 bytes each, in base64; ``e`` one of all ``n``, 16 bytes, in base64.
``g`` is ``b`` times the least power of two that leaves at most 256 digests, so that the
field stays below 2.2 kB at any length (1.6 kB for 24k tokens in blocks of 128).

Every digest is BLAKE2b-128 over the seed, then per ``g`` tokens their ids as little-endian
uint32 and the multimodal items that begin among them; each covers all before it. A prompt
that parts from the turn passes for one that does not with a chance of 2**-48 where a
shortened digest decides and of 2**-128 for the whole turn. Whoever looks for such a prompt
on purpose must know the seed; with a secret it is keyed.
"""

import base64
import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

VERSION = 2
MOST_DIGESTS = 128
"""Keeps a handle small wherever it waits; a longer turn has one for several blocks."""
SHORT = 6
"""Bytes of a digest in ``d``."""

Feature = tuple[int, int, str]
"""A multimodal item of a prompt: first token, length in tokens, content hash."""

_NO_FEATURES: tuple[Feature, ...] = ()


def packed(token_ids: Iterable[int]) -> Sequence[int]:
    """Token ids in the form that digests are made of, for those that are compared again.

    Unchanged when one of them is outside uint32: such ids prove nothing.
    """
    ids = token_ids if isinstance(token_ids, list) else list(token_ids)
    try:
        return array("I", ids)
    except OverflowError:
        return ids


def continued(ids: Sequence[int], more: Sequence[int]) -> Sequence[int]:
    """:func:`packed` ids with further ones behind them."""
    both = array("I", ids) if isinstance(ids, array) else list(ids)
    try:
        both.extend(more)
    except OverflowError:
        return [*ids, *more]
    return both


def proof_seed(
    model: Sequence[str | None], lora: str | None, cache_salt: str | None, key: bytes = b""
) -> bytes:
    """What besides tokens and multimodal items decides the KV of a prompt.

    The same things that vLLM mixes into the block hashes of its prefix cache. ``model`` also
    names the tokenizer. ``key``: at most 64 bytes that no client knows.
    """
    text = json.dumps([*model, lora, cache_salt], separators=(",", ":")).encode()
    return blake2b(text, digest_size=32, key=key).digest()


def tokens_per_digest(num_tokens: int, block_size: int) -> int:
    """``g`` of a turn."""
    stride = block_size
    while num_tokens // stride > MOST_DIGESTS:
        stride *= 2
    return stride


def make_proof(
    seed: bytes,
    token_ids: Sequence[int],
    block_size: int,
    features: Sequence[Feature] = _NO_FEATURES,
    whole_only: bool = False,
) -> dict[str, Any]:
    """The proof field of a handle whose blocks hold exactly ``token_ids``.

    ``whole_only``: it proves all tokens or none, and is small.
    """
    num_tokens = len(token_ids)
    stride = max(num_tokens, 1) if whole_only else tokens_per_digest(num_tokens, block_size)
    try:
        *short, whole = _digests(seed, token_ids, stride, features)
    except OverflowError:
        return unprovable(num_tokens, block_size)
    return {
        "v": VERSION,
        "n": num_tokens,
        "b": block_size,
        "g": stride,
        "d": base64.b64encode(b"".join(digest[:SHORT] for digest in short)).decode(),
        "e": base64.b64encode(whole).decode(),
    }


def unprovable(num_tokens: int, block_size: int) -> dict[str, Any]:
    """The proof field of a handle whose tokens cannot be told; it matches no prompt."""
    return {"v": VERSION, "n": num_tokens, "b": block_size, "g": block_size, "d": "", "e": ""}


def block_size_of(proof: object) -> int | None:
    """Tokens per block of the leg that made the proof, None when it does not say."""
    size = proof.get("b") if isinstance(proof, Mapping) else None
    return size if isinstance(size, int) and _is_count(size) else None


def tokens_proven(
    proof: object,
    num_tokens: int,
    seed: bytes,
    prompt_token_ids: Sequence[int],
    features: Sequence[Feature] = _NO_FEATURES,
) -> int:
    """How many first tokens of a prompt are those of a handle: all ``num_tokens`` of it, or a
    multiple of the proof's ``g``.

    A proof for another number of tokens, of an unknown version or of a wrong shape proves none.
    """
    if not isinstance(proof, Mapping) or proof.get("v") != VERSION:
        return 0
    stride = proof.get("g")
    if proof.get("n") != num_tokens or not isinstance(stride, int) or not _is_count(stride):
        return 0
    short, whole = _decoded(proof.get("d")), _decoded(proof.get("e"))
    if len(short) != num_tokens // stride * SHORT or len(whole) != 16:
        return 0
    known = min(num_tokens, len(prompt_token_ids))
    proven = 0
    try:
        for digest in _digests(seed, prompt_token_ids[:known], stride, features):
            at = proven // stride * SHORT
            if proven + stride > known:
                return num_tokens if known == num_tokens and digest == whole else proven
            if digest[:SHORT] != short[at : at + SHORT]:
                return proven
            proven += stride
    except OverflowError:
        return 0
    return proven


def _digests(
    seed: bytes, token_ids: Sequence[int], stride: int, features: Sequence[Feature]
) -> Iterator[bytes]:
    """Digests of the first ``stride``, ``2 * stride``, ... tokens, and last one of all.

    Raises OverflowError for an id outside uint32.
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    view = memoryview(ids)
    state = blake2b(seed, digest_size=16)
    whole = len(ids) // stride * stride
    for start in range(0, whole, stride):
        state.update(view[start : start + stride])
        if features:
            state.update(_features_bytes(features, start, start + stride))
        yield state.copy().digest()
    state.update(view[whole:])
    state.update(_features_bytes(features, whole, len(ids)))
    state.update(b"end")
    yield state.digest()


def _features_bytes(features: Sequence[Feature], start: int, end: int) -> bytes:
    """The items that begin in a stretch of tokens; nothing for none.

    No tokens can stand for them: the first four bytes are an id beyond every vocabulary.
    """
    here = [feature for feature in features if start <= feature[0] < end]
    return b"item" + json.dumps(here, separators=(",", ":")).encode() if here else b""


def _decoded(text: object) -> bytes:
    if not isinstance(text, str):
        return b""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
