"""The shape of KV, which prefill and decode must share."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.history import BLOCK_SIZE_SET
from pdctl.doctor.checks.lines import COMPATIBILITY, TRANSFER_FAILURE
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import (
    LOG_SETTINGS,
    Setting,
    differing,
    is_true,
    setting,
    settings,
)
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Finding, Pattern

TP_LIMIT = Pattern(
    "tensor-parallel-limit",
    (
        "KV-head sharding boundary",
        "P TP > D TP",
        "remote_tp_size",
        "block_size_ratio_from_engine_id",
        "TP size",
        "tp_size",
        "different TP",
        "tensor parallel",
        "error loading remote metadata",
        "must be divisible by",
        "cache must be of shape",
    ),
    r"sharding boundary|P[_ ]TP > D[_ ]TP|(?P<unregistered>block_size_ratio_from_engine_id)"
    r"|(?P<shape>cache must be of shape)"
    r"|(?i:(?:not support\w*|mismatch|differ\w*|unequal|incompatible)\b.{0,400}"
    r"\b(?:TP|tp_size|tensor parallel)\b)"
    r"|(?i:\b(?:TP|tp_size|tensor parallel) (?:size\w* )?.{0,400}"
    r"(?:mismatch|not supported|must match|differ))"
    r"|(?P<metadata>error loading remote metadata)|remote_tp_size",
)
LAYOUT = Pattern(
    "layout-differs",
    ("same kv_cache_layout", "requires contiguous heads", "block-contiguous layout"),
)
HYBRID = Pattern(
    "hybrid-prefix-caching",
    (
        "SSM can only have one",
        "physical_blocks_per_logical",
        "for Mamba hybrid models",
        "unpairable SSM state",
        "hybrid MLA+Mamba",
        "requires DS conv state layout",
    ),
    r"SSM can only have one|heterogeneous physical_blocks_per_logical|for Mamba hybrid models"
    r"|unpairable SSM state|hybrid MLA\+Mamba|requires DS conv state layout",
)
BLOCK_GEOMETRY = Pattern(
    "block-geometry",
    (
        "block sizes are not supported",
        "block_len must",
        "KV cache sizes must match",
        "Number of KV layers must match",
        "nixl_agent_meta.num_blocks",
        "block lengths must match",
        "nixl_agent_meta.block_len",
        "Number of KV cache groups must match",
        "must have the same number of blocks",
        "cache must be of shape",
        "block size",
        "block_size",
    ),
    r"block sizes are not supported|block_len must|KV cache sizes must match"
    r"|Number of KV layers must match|nixl_agent_meta\.(?:num_blocks|block_len)"
    r"|block lengths must match|Number of KV cache groups must match"
    r"|must have the same number of blocks|(?P<shape>cache must be of shape)"
    r"|(?i:(?:remote|local|prefill|decode|peer)\b.{0,80}\bblock[ _]size\b.{0,80}"
    r"(?:mismatch|does not match|doesn't match|not equal|differs?\b|must match))"
    r"|(?i:\bblock[ _]size mismatch)",
)


def _tensor_parallel(evidence: Evidence) -> Iterator[Answer]:
    unequal = differing(evidence, "tensor_parallel")
    limit, failed = seen(evidence, TP_LIMIT), seen(evidence, TRANSFER_FAILURE)
    refused = any("handshake" in each for each in failed.counts("type"))
    named = limit and not (
        limit.counts("metadata")
        or limit.counts("shape")
        or (refused and limit.counts("unregistered"))
    )
    if not named and not (unequal and (limit or refused)):
        return
    sizes = ", ".join(f"{each.role} {each.value}" for each in unequal) or "see the message"
    yield Finding(
        limit.leg if limit else failed.leg,
        "likely",
        (*(each.excerpt for each in unequal), *limit.excerpts[:1], *failed.excerpts[:1])[:4],
        f"Prefill and decode have different tensor parallel sizes ({sizes}) that this vLLM cannot "
        "bridge for this model: what works depends on version, model (hybrid attention, MLA) and "
        "direction; prefill wider than decode came late. Differing block counts in the failure's "
        "context are normal then and not the cause.",
        "Give both roles the same --tensor-parallel-size, unless vLLM's release notes name your "
        "version and model for unequal ones; send the same long prompt twice before you trust it.",
    )


def _cache_dtype(evidence: Evidence) -> Iterator[Answer]:
    unequal = differing(evidence, "cache_dtype", default="auto")
    if not unequal:
        return
    unchecked = setting(evidence, "enforce_compat")
    off = unchecked is not None and is_true(unchecked.value) is False
    mismatch = seen(evidence, COMPATIBILITY)
    yield Finding(
        unequal[1].leg,
        "certain",
        (
            *(each.excerpt for each in unequal),
            *mismatch.excerpts[:1],
            *((unchecked.excerpt,) if off and unchecked else ()),
        ),
        "Prefill and decode keep KV in different dtypes "
        f"({', '.join(f'{each.role} {each.value}' for each in unequal)}): pages have different "
        "lengths and nothing converts. vLLM refuses the handshake"
        + (
            ", but enforce_handshake_compat is off: wrong text, and reads beyond the block."
            if off
            else "; an engine without that check serves wrong text and writes past its blocks."
        ),
        "Use one --kv-cache-dtype on both roles (pdctl spec: model.kv_cache_dtype) and leave "
        "enforce_handshake_compat on.",
    )


def _layout(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, LAYOUT)
    forced = settings(evidence, "layout")
    values = {str(each.value).upper() for each in forced}
    if not found and len(values) < 2:
        return
    yield Finding(
        forced[0].leg if forced else found.leg,
        "certain" if found else "likely",
        (*found.excerpts[:2], *(each.excerpt for each in forced[:2])),
        "The KV cache layout of one side is forced (VLLM_KV_CACHE_LAYOUT), and with different "
        "tensor parallel sizes the heads must lie together in a block on both sides.",
        "Unset VLLM_KV_CACHE_LAYOUT: the NIXL connector asks for the right layout itself. "
        "Otherwise set kv_connector_extra_config enable_permute_local_kv on decode.",
    )


def _hybrid(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, HYBRID)
    if found:
        caching = [e for e in settings(evidence, "prefix_caching") if is_true(e.value)]
        yield Finding(
            found.leg,
            "certain",
            (*found.excerpts, *(each.excerpt for each in caching[:1])),
            "The model mixes attention with state space (Mamba) layers, and this NIXL connector "
            "does not support prefix caching for their state: it works until a prompt overlaps an "
            "earlier one, and nothing checks it at the start.",
            "Add --no-enable-prefix-caching on decode for such models, or upgrade vLLM; prove it "
            "by sending the same prompt twice.",
        )


def _block_size(evidence: Evidence) -> Iterator[Answer]:
    unequal = differing(evidence, "block_size") or _raised_block_sizes(evidence)
    found = seen(evidence, BLOCK_GEOMETRY)
    if not unequal and not found:
        return
    shape_only = found.count == sum(found.counts("shape").values())
    if not unequal and shape_only and differing(evidence, "tensor_parallel"):
        return
    sizes = ", ".join(f"{each.role} {each.value}" for each in unequal)
    yield Finding(
        unequal[1].leg if unequal else found.leg,
        "likely",
        (*(each.excerpt for each in unequal), *found.excerpts[:2])[:4],
        f"KV blocks have another geometry on prefill than on decode ({sizes or 'see the message'})."
        " Unequal blocks need conversion, which exists for few layouts and directions only.",
        "Use the same --block-size, model, layout and number of layers on both roles (pdctl spec: "
        "kv_transfer.block_size).",
    )


def _raised_block_sizes(evidence: Evidence) -> list[Setting]:
    """Block sizes that vLLM chose for a hybrid model, when the roles got different ones."""
    of_role: dict[str, Setting] = {}
    for leg in evidence.engines:
        hits = leg.hits.get(BLOCK_SIZE_SET.name)
        if hits and (tokens := hits.value("tokens")):
            of_role.setdefault(leg.role, Setting(leg.name, leg.role, tokens, hits.excerpts[0]))
    found = list(of_role.values())
    return found if len({each.value for each in found}) > 1 else []


CHECKS = (
    Check(
        "PD3002",
        "Unequal tensor parallel sizes",
        Category.CONFIG_MISMATCH,
        "error",
        "tensor-parallel-unequal",
        _tensor_parallel,
        needs=("log|config",),
        patterns=(TP_LIMIT, TRANSFER_FAILURE, *LOG_SETTINGS),
        explains=("PD2004", "PD2009", "PD1015", "PD3008", "PD8505"),
    ),
    Check(
        "PD3003",
        "KV cache dtypes differ",
        Category.CONFIG_MISMATCH,
        "error",
        "cache-dtype-differs",
        _cache_dtype,
        needs=("config",),
        patterns=(COMPATIBILITY, *LOG_SETTINGS),
        explains=("PD3008", "PD3062", "PD2009", "PD2006", "PD6509"),
    ),
    Check(
        "PD3004",
        "KV cache layout forced on one side",
        Category.CONFIG_MISMATCH,
        "error",
        "cache-layout-differs",
        _layout,
        needs=("log|env",),
        patterns=(LAYOUT, *LOG_SETTINGS),
        explains=("PD3002", "PD3008", "PD2009"),
    ),
    Check(
        "PD3005",
        "Prefix caching with a hybrid model",
        Category.CONFIG_MISMATCH,
        "error",
        "hybrid-prefix-caching",
        _hybrid,
        needs=("log",),
        patterns=(HYBRID, *LOG_SETTINGS),
        explains=("PD8505", "PD2009"),
    ),
    Check(
        "PD3006",
        "KV blocks differ between the roles",
        Category.CONFIG_MISMATCH,
        "error",
        "block-size-differs",
        _block_size,
        needs=("log|config",),
        patterns=(BLOCK_GEOMETRY, BLOCK_SIZE_SET, *LOG_SETTINGS),
        premises=("PD3003",),
        explains=("PD3008", "PD3062", "PD2009", "PD8505"),
    ),
)
