"""What must be equal for prefill and decode to accept each other: versions, models, shapes."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.lines import COMPATIBILITY
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import (
    LOG_SETTINGS,
    Setting,
    differing,
    same,
    settings,
)
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Finding

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
        paths = {str(each.value).startswith(("/", ".", "s3:")) for each in unequal}
        if name == "model" and len(paths) > 1:
            continue
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


CHECKS = (
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
)
