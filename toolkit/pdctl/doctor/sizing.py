"""How many tokens decode's TTL pins, whether they fit, and which TTL does. Pure.

Decode keeps the blocks of a finished turn until prefill reads them, once, for the next turn, or
until the TTL is over. So every conversation in progress holds its context, running or pinned; a
conversation that has ended holds it for one TTL more. With N conversations in progress that each
go on for T seconds, N / T end per second:

    tokens held = context * N * (1 + TTL / T)

Prefix blocks that conversations share are counted once per conversation: it is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BYTES = {
    "float32": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "fp8_ds_mla": 1, "int8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What a token costs in KV cache: ``bytes_per_token`` over all layers and heads of the model,
    before it is divided over tensor-parallel ranks; ``kind`` is gqa or mla."""

    kind: str
    layers: int
    bytes_per_token: int


@dataclass(frozen=True)
class Load:
    """What clients do. ``context`` in tokens, times in seconds."""

    conversations: int
    context: int
    turn_gap: float
    conversation_time: float


@dataclass(frozen=True)
class Answer:
    """``capacity`` and ``needed`` in tokens of one decode leg; ``longest_ttl`` is the longest that
    fits, in seconds, 0 when none does."""

    capacity: int
    in_progress: int
    pinned: int
    longest_ttl: float

    @property
    def needed(self) -> int:
        return self.in_progress + self.pinned

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity


def shape_of(config: dict[str, Any], cache_dtype: str, dtype: str) -> Shape | None:
    """From a model's ``config.json``; None when it does not have the usual fields, or layers that
    keep no KV (Mamba, linear attention) are among them.

    Args:
        cache_dtype: vLLM's kv_cache_dtype; "auto" means the model's type.
        dtype: the type of weights, "auto" for the one in config.json.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any("linear" in str(k) or "mamba" in str(k) for k in kinds):
        return None
    if any("mamba" in key or key.startswith("ssm") for key in config):
        return None
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        return None
    own = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    name = cache_dtype if cache_dtype != "auto" else (dtype if dtype != "auto" else str(own))
    size = _BYTES.get(name.removeprefix("torch."))
    if size is None:
        return None
    rank, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if isinstance(rank, int) and isinstance(rope, int):
        return Shape("mla", layers, layers * (rank + rope) * size)
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(config.get("hidden_size"), int):
        head_dim = config["hidden_size"] // heads
    if not isinstance(kv_heads, int) or not isinstance(head_dim, int):
        return None
    return Shape("gqa", layers, 2 * layers * kv_heads * head_dim * size)


def size(load: Load, ttl: float, capacity: int, legs: int) -> Answer:
    """Of ``legs`` decode legs that share the conversations evenly.

    Args:
        capacity: tokens that the KV cache of one leg holds.
    """
    in_progress = -(-load.conversations // legs) * load.context
    per_second = in_progress / load.conversation_time
    room = capacity - in_progress
    return Answer(
        capacity,
        in_progress,
        round(per_second * ttl),
        max(0.0, room / per_second) if per_second else 0.0,
    )
