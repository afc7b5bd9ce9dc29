"""What depends on vLLM's version."""

import re
from typing import Literal

from pdctl.spec.model import Spec

OLDEST_VLLM = (0, 21)
"""First version with ``bidirectional_kv_xfer``."""

CROSS_LAYER_KEY_UNTIL = (0, 29)
"""``enable_cross_layers_blocks`` exists in vLLM before this version; later ones choose the
layout by ``VLLM_KV_CACHE_LAYOUT``."""

KV_RANK_UNTIL = (0, 32)
"""vLLM before this version has ``kv_rank`` and ``kv_parallel_size``, which NIXL does not need;
later ones refuse them."""

_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?:[.+a-z][a-z0-9.+-]*)?")


def version(text: str) -> tuple[int, ...]:
    """``(0, 29, 0)`` of ``"0.29.0"``; empty when it is not a version."""
    match = _VERSION.fullmatch(text)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def vllm_version(spec: Spec) -> tuple[int, ...]:
    return version(spec.engine.vllm)


def has_kv_rank(spec: Spec) -> bool:
    """Whether a kv-transfer-config may tell ranks."""
    return vllm_version(spec) < KV_RANK_UNTIL


def cross_layers(spec: Spec) -> Literal["key", "layout", "off"]:
    """How this vLLM lays all layers of a block side by side, if it is to."""
    wanted = spec.kv_transfer.cross_layer_blocks
    has_key = vllm_version(spec) < CROSS_LAYER_KEY_UNTIL
    if wanted == "auto":
        return "key" if has_key and spec.engine.device == "cuda" else "off"
    if not wanted:
        return "off"
    return "key" if has_key else "layout"
