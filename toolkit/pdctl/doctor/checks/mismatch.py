"""Settings that prefill and decode must share, and settings nobody reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import BACKEND_CREATED, COMPATIBILITY, TRANSFER_FAILURE
from pdctl.doctor.checks.reading import (
    LOG_SETTINGS,
    Setting,
    backends,
    differing,
    is_true,
    same,
    seen,
    setting,
    settings,
    whole_command_line,
)
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

UNKNOWN_VARIABLE = Pattern(
    "unknown-variable",
    ("Unknown vLLM environment variable",),
    r"Unknown vLLM environment variable detected: (?P<name>\w+)",
)
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
    ),
    r"sharding boundary|P[_ ]TP > D[_ ]TP|block_size_ratio_from_engine_id"
    r"|(?i:(?:not support\w*|mismatch|differ\w*|unequal|incompatible)\b.*"
    r"\b(?:TP|tp_size|tensor parallel)\b)"
    r"|(?i:\b(?:TP|tp_size|tensor parallel) (?:size\w* )?.*"
    r"(?:mismatch|not supported|must match|differ))"
    r"|(?P<metadata>error loading remote metadata)|remote_tp_size",
)
LAYOUT = Pattern(
    "layout-differs",
    ("same kv_cache_layout", "requires contiguous heads", "block-contiguous layout"),
)
UNSUPPORTED = Pattern(
    "connector-unsupported",
    (
        "not supported for NIXL",
        "NixlConnector PCP",
        "NixlPushConnector does not support",
        "NixlPushConnector consumer",
        "kv_buffer is not supported",
        "DCP is not supported",
        "does not preserve CSA",
        "do not support bidirectional",
    ),
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
    ),
)


def _backend_variable(evidence: Evidence) -> Iterator[Answer]:
    unknown = seen(evidence, UNKNOWN_VARIABLE)
    in_log = [n for n in unknown.counts("name") if "BACKEND" in n and "NIXL" in n]
    if any("LIBFABRIC" in names for _, names in backends(evidence)):
        return
    for leg in evidence.legs:
        mine = [
            Excerpt(f"{leg.name}/env.txt", f"{name}={value}")
            for name, value in (leg.env or {}).items()
            if re.search(r"NIXL\w*BACKEND|KVCACHE_BACKEND", name)
        ]
        if leg.config:
            mine += [
                Excerpt(f"{leg.name}/config.txt", f"{path}: {value}")
                for path, value in leg.config.values
                if re.fullmatch(r"(?:.*\.)?[A-Z_]*NIXL[A-Z_]*BACKENDS?", path)
            ]
        told = bool(in_log) and leg.name in unknown.legs
        if not mine and not told:
            continue
        created = leg.hits.get(BACKEND_CREATED.name)
        opened = list(created.values.get("backend", ())) if created else []
        yield Finding(
            leg.name,
            "certain" if told or "UCX" in opened else "likely",
            (
                *mine[:2],
                *(unknown.excerpts[:1] if told else ()),
                *(created.excerpts[:1] if created else ()),
            )[:4],
            "The backend is chosen by an environment variable that nothing reads: the only place "
            "is kv_connector_extra_config.backends, and its default is [UCX].",
            'Put it there: --kv-transfer-config \'{..., "kv_connector_extra_config": {"backends": '
            '["LIBFABRIC"]}}\' (pdctl spec: kv_transfer.backend), and drop the variable. The log '
            "must then say 'Backend LIBFABRIC was instantiated'.",
        )


def _tensor_parallel(evidence: Evidence) -> Iterator[Answer]:
    unequal = differing(evidence, "tensor_parallel")
    limit, failed = seen(evidence, TP_LIMIT), seen(evidence, TRANSFER_FAILURE)
    named = limit and set(limit.counts("metadata")) == set()
    if not named and not (
        unequal and (limit or any("handshake" in t for t in failed.counts("type")))
    ):
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
    unequal = differing(evidence, "block_size")
    found = seen(evidence, BLOCK_GEOMETRY)
    if not unequal and not found:
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


def _one_sided(evidence: Evidence) -> Iterator[Answer]:
    of_role: dict[str, Setting] = {}
    for each in settings(evidence, "bidirectional"):
        if is_true(each.value) is not None:
            of_role.setdefault(each.role, each)
    for leg in evidence.engines:
        line = whole_command_line(leg)
        connector = setting(evidence, "connector", leg.role)
        implied = line or (
            connector.excerpt if connector and "kv_transfer" in connector.excerpt.text else None
        )
        if leg.role not in of_role and len(of_role) == 1 and implied:
            of_role[leg.role] = Setting(leg.name, leg.role, False, implied)
    if set(of_role) != {"prefill", "decode"}:
        return
    prefill, decode = of_role["prefill"], of_role["decode"]
    if is_true(prefill.value) == is_true(decode.value):
        return
    if is_true(prefill.value):
        wrong = decode
        cause = (
            "bidirectional_kv_xfer is on for prefill and off for decode: decode frees its blocks "
            "at the end of a turn and hands out no kv_transfer_params, so every turn is a miss."
        )
    else:
        wrong = prefill
        cause = (
            "bidirectional_kv_xfer is off for prefill and on for decode: decode pins every "
            "finished turn for its TTL for nothing, and a stock prefill that is given a handle "
            "waits for ever, without an error."
        )
    yield Finding(
        wrong.leg,
        "certain",
        (prefill.excerpt, decode.excerpt),
        cause,
        "Set it alike on both legs (pdctl spec: kv_transfer.bidirectional) and restart both.",
    )


_HASHED = (
    ("cross_layer", "enable_cross_layers_blocks", "False"),
    ("attention", "--attention-backend", None),
    ("model", "--model", None),
    ("block_size", "--block-size", None),
    ("connector", "kv_connector", None),
)


def _compatibility(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, COMPATIBILITY)
    if not found:
        return
    unequal: list[Setting] = []
    for name, _, default in _HASHED:
        unequal += differing(evidence, name, default)
        if name == "cross_layer" and not unequal:
            stated = settings(evidence, name)
            unequal += stated if len({each.role for each in stated}) == 1 else []
    names = ", ".join(each.excerpt.text for each in unequal) or "the evidence does not show which"
    yield Finding(
        found.leg,
        "likely" if unequal else "possible",
        (*found.excerpts[:2], *(each.excerpt for each in unequal[:2])),
        "Prefill and decode refuse each other: something that the compatibility hash covers "
        f"differs ({names}). It covers vLLM and connector version, model and dtype, KV cache dtype "
        "and layout, attention backend, cross-layer blocks and push or pull.",
        "Compare both legs: pdctl collect SPEC, then the two config.txt and versions.txt. Render "
        "both from one spec. Do not set enforce_handshake_compat to false: it hides wrong reads.",
    )


def _model(evidence: Evidence) -> Iterator[Answer]:
    for name, what in (
        ("model", "models"),
        ("revision", "revisions of the model"),
        ("chat_template", "chat templates"),
        ("tokenizer", "tokenizers"),
        ("max_model_len", "context lengths"),
    ):
        unequal = differing(evidence, name)
        if unequal and not same(*(str(e.value).rstrip("/").rpartition("/")[2] for e in unequal)):
            yield Finding(
                unequal[1].leg,
                "likely",
                tuple(each.excerpt for each in unequal),
                f"Prefill and decode have different {what}: "
                f"{', '.join(f'{each.role} {each.value}' for each in unequal)}.",
                "Use one model, revision and --max-model-len on all legs, rendered from one spec.",
                severity="warning" if name == "max_model_len" else "error",
            )


def _connector_kind(evidence: Evidence) -> Iterator[Answer]:
    def kind(value: object) -> str:
        text = str(value)
        return "push" if "Push" in text else "pull" if "Nixl" in text else text

    of_role: dict[str, Setting] = {}
    for each in settings(evidence, "connector"):
        of_role.setdefault(each.role, each)
    if len(of_role) < 2:
        return
    prefill, decode = of_role["prefill"], of_role["decode"]
    if kind(prefill.value) == kind(decode.value) or "Multi" in f"{prefill.value}{decode.value}":
        return
    yield Finding(
        decode.leg,
        "certain",
        (prefill.excerpt, decode.excerpt),
        f"Prefill runs {prefill.value}, decode {decode.value}: the two do not speak to each other "
        "(the compatibility hash includes push or pull).",
        "Use the same connector on both legs. Bidirectional transfer needs the pull connector.",
    )


def _roles(evidence: Evidence) -> Iterator[Answer]:
    meant = {"prefill": "kv_producer", "decode": "kv_consumer"}
    for each in settings(evidence, "role"):
        value = str(each.value)
        if value in meant.values() and value != meant[each.role]:
            yield Finding(
                each.leg,
                "certain",
                (each.excerpt,),
                f"The {each.role} leg runs as {value}.",
                f"Set kv_role to {meant[each.role]} on {each.role} (pdctl render does).",
            )


def _unsupported(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, UNSUPPORTED)
    if found:
        yield Finding(
            found.leg,
            "certain",
            found.excerpts,
            "The connector refuses this combination of settings; the message says which.",
            "Change the setting that the message names on both legs. Bidirectional transfer needs "
            "the pull connector, no prefill context parallelism and no pipeline on decode.",
        )


def _speculative(evidence: Evidence) -> Iterator[Answer]:
    of_role: dict[str, Setting] = {}
    for each in settings(evidence, "speculative"):
        of_role.setdefault(each.role, each)
    drafts = [
        e
        for e in of_role.values()
        if re.search(r"eagle|mtp|dflash|dspark|draft", str(e.value), re.I)
    ]
    if len(of_role) != 1 or not drafts:
        return
    other = next(
        (leg for leg in evidence.engines if leg.role not in of_role and leg.config is not None),
        None,
    )
    if other:
        yield Finding(
            drafts[0].leg,
            "likely",
            (
                drafts[0].excerpt,
                Excerpt(f"{other.name}/config.txt", "no speculative configuration"),
            ),
            "Only one role runs a draft model: its layers add KV blocks that the other side does "
            "not have. Short prompts work, long ones fail with illegal memory accesses.",
            "Give both roles the same --speculative-config, or use ngram speculation on decode.",
        )


CHECKS = (
    Check(
        "PD3001",
        "The backend is set where nobody reads it",
        Category.CONFIG_MISMATCH,
        "error",
        "backend-variable-ignored",
        _backend_variable,
        needs=("env|log|config",),
        patterns=(UNKNOWN_VARIABLE, BACKEND_CREATED, *LOG_SETTINGS),
    ),
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
        patterns=(BLOCK_GEOMETRY, *LOG_SETTINGS),
        premises=("PD3003",),
        explains=("PD3008", "PD3062", "PD2009", "PD8505"),
    ),
    Check(
        "PD3007",
        "Bidirectional transfer on one leg only",
        Category.CONFIG_MISMATCH,
        "error",
        "bidirectional-one-sided",
        _one_sided,
        needs=("config|log|settings",),
        patterns=LOG_SETTINGS,
        premises=("PD3060",),
        explains=("PD4511", "PD5007", "PD6001", "PD5501", "PD4562", "PD5560"),
    ),
    Check(
        "PD3008",
        "Prefill and decode refuse each other",
        Category.CONFIG_MISMATCH,
        "error",
        "compatibility-hash",
        _compatibility,
        needs=("log",),
        patterns=(COMPATIBILITY, *LOG_SETTINGS),
        premises=("PD3003", "PD6509"),
        explains=("PD2009", "PD4511"),
    ),
    Check(
        "PD3009",
        "Prefill and decode serve different models",
        Category.CONFIG_MISMATCH,
        "error",
        "model-differs",
        _model,
        needs=("config",),
        patterns=LOG_SETTINGS,
        explains=("PD3008",),
    ),
    Check(
        "PD3010",
        "Connectors that do not fit",
        Category.CONFIG_MISMATCH,
        "error",
        "connectors-differ",
        _connector_kind,
        needs=("config|log",),
        patterns=LOG_SETTINGS,
        explains=("PD3008", "PD2009"),
    ),
    Check(
        "PD3011",
        "Roles are swapped",
        Category.CONFIG_MISMATCH,
        "error",
        "roles-swapped",
        _roles,
        needs=("config|log",),
        patterns=LOG_SETTINGS,
    ),
    Check(
        "PD3013",
        "The connector does not support this combination",
        Category.CONFIG_MISMATCH,
        "error",
        "combination-unsupported",
        _unsupported,
        needs=("log",),
        patterns=(UNSUPPORTED,),
        explains=("PD8505",),
    ),
    Check(
        "PD3012",
        "A draft model on one role only",
        Category.CONFIG_MISMATCH,
        "error",
        "speculation-one-sided",
        _speculative,
        needs=("config",),
        patterns=LOG_SETTINGS,
        explains=("PD3008",),
    ),
)
