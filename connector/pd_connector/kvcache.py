"""What a KV cache's layout means for reading blocks back."""

from dataclasses import fields
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput


def only_full_attention(kv_cache_config: Any) -> bool:
    """Whether the cache is one group of full-attention layers."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and all(
        isinstance(spec, FullAttentionSpec) for spec in _layer_specs(groups[0])
    )


def why_reads_are_unsafe(kv_cache_config: Any) -> str | None:
    """Why a readback could end in wrong tokens with this cache, or None."""
    if only_full_attention(kv_cache_config):
        return None
    groups = kv_cache_config.kv_cache_groups
    if any(isinstance(spec, MambaSpec) for group in groups for spec in _layer_specs(group)):
        return "the state of a recurrent layer cannot be matched with a number of tokens"
    if all(field.name != "failed_recving" for field in fields(KVConnectorOutput)):
        return "this vLLM does not report failed reads of a hybrid KV cache"
    return None


def clippable_block_sizes(kv_cache_config: Any) -> list[int | None]:
    """Tokens per block of each cache group, None where blocks are not positions."""
    return [
        None
        if any(isinstance(spec, MambaSpec) for spec in _layer_specs(group))
        else group.kv_cache_spec.block_size
        for group in kv_cache_config.kv_cache_groups
    ]


def _layer_specs(group: Any) -> tuple[Any, ...]:
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    return tuple(per_layer.values()) if per_layer else (spec,)


def why_not_read_back(connector: Any, kv_cache_config: Any) -> str | None:
    """Why this side of the connector, scheduler or worker, must not read back, or None."""
    if connector.use_host_buffer:
        return "with a host KV buffer vLLM never issues the read (kv_buffer_device: cpu)"
    return why_reads_are_unsafe(kv_cache_config)
