"""What one leg has or does and its peer has not: transfers both ways, a draft model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.settings import (
    LOG_SETTINGS,
    Setting,
    is_true,
    setting,
    settings,
    whole_command_line,
)
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding


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
        "PD3007",
        "Bidirectional transfer on one leg only",
        Category.CONFIG_MISMATCH,
        "error",
        "bidirectional-one-sided",
        _one_sided,
        needs=("config|log|settings",),
        patterns=LOG_SETTINGS,
        explains=("PD4511", "PD5007", "PD6001", "PD5501"),
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
        explains=("PD2009", "PD3006", "PD3008"),
    ),
)
