"""Thresholds and histories: why turns that could be read back are not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pdctl.doctor.checks.captures import requests
from pdctl.doctor.checks.lines import KV_TRANSFER_METRICS
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, number, setting, settings
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

BLOCK_SIZE_SET = Pattern(
    "attention-block-size",
    ("attention block size to",),
    r"[Ss]etting attention block size to (?P<tokens>\d+)",
)

TURNS = "pd_router_turns_total"


def _threshold_ignored(evidence: Evidence) -> Iterator[Answer]:
    for each in settings(evidence, "threshold", "decode"):
        tokens = number(each.value) or 0
        small = _small_transfers(evidence, "decode")
        if tokens > 64 and small:
            yield Finding(
                each.leg,
                "likely",
                (each.excerpt, small),
                f"kv_recompute_threshold ({tokens:g}) does not apply to ordinary transfers from "
                "prefill to decode: vLLM consults it only when prefill reads back from decode, so "
                "short prompts still pay a transfer. A low rate on transfers below one MB is fixed "
                "overhead, not a bad fabric.",
                "Send short prompts to decode alone in the router (pd-router: router.route). "
                "Leave the threshold for readback.",
                severity="info",
            )


def _small_transfers(evidence: Evidence, role: str) -> Excerpt | None:
    for leg in evidence.role(role):
        hits = leg.hits.get(KV_TRANSFER_METRICS.name)
        for hit in hits.last if hits else ():
            if int(hit.groups["transfers"]) and float(hit.groups["mb"]) < 1:
                return hit.excerpt
        if leg.metrics:
            total = leg.metrics.value("vllm:nixl_bytes_transferred_sum")
            count = leg.metrics.value("vllm:nixl_bytes_transferred_count")
            if total and count and total / count < 1e6:
                return leg.metrics.excerpt("vllm:nixl_bytes_transferred_sum")
    return None


_PREFIX = re.compile(r"(?i)common prefix\D*?(?:with turn \d+\D*)?(\d+)\s*(?:of|/)\s*(\d+)")


def _template(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.legs:
        for capture in leg.http:
            match = _PREFIX.search(capture.text)
            if not match or int(match[1]) >= 0.9 * int(match[2]):
                continue
            queries = leg.metrics.value("vllm:prefix_cache_queries_total") if leg.metrics else None
            shown = [capture.excerpt]
            if queries and leg.metrics:
                shown.append(leg.metrics.excerpt("vllm:prefix_cache_hits_total"))
            yield Finding(
                leg.name,
                "certain",
                tuple(shown),
                f"The prompt of a turn shares only {match[1]} of {match[2]} tokens with the turn "
                "before: the chat template renders earlier assistant turns differently from how "
                "they were generated (an empty think block on the newest turn only, or reasoning "
                "left out), so nothing behind that point can be reused.",
                "Use a template that renders history as it was generated, or send "
                "reasoning_content back. Compare /tokenize of two consecutive turns.",
            )


def _inert_cache(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, BLOCK_SIZE_SET)
    for leg in evidence.legs:
        hits = leg.hits.get(BLOCK_SIZE_SET.name)
        longest = setting(evidence, "max_model_len", leg.role)
        block = float(hits.value("tokens") or 0) if hits else None
        source = hits.excerpts[:1] if hits else ()
        if block is None and (stated := setting(evidence, "block_size", leg.role)):
            block, source = number(stated.value), (stated.excerpt,)
        limit = number(longest.value) if longest else None
        if not block or not limit or block < limit:
            continue
        metric = (
            (leg.metrics.excerpt("vllm:prefix_cache_hits_total"),)
            if leg.metrics and leg.metrics.value("vllm:prefix_cache_queries_total")
            else ()
        )
        yield Finding(
            leg.name,
            "certain",
            (*source, *((longest.excerpt,) if longest else ()), *metric),
            f"A KV block holds {block:g} tokens and the longest prompt {limit:g}: only whole "
            "blocks are cached or transferred, so prefix caching and reuse never happen.",
            "Raise --max-model-len above the block size, or accept that this model has no reuse "
            "at this length.",
        )
    _ = found


def _threshold_too_high(evidence: Evidence) -> Iterator[Answer]:
    for each in settings(evidence, "threshold", "prefill"):
        longest = setting(evidence, "max_model_len", "prefill")
        tokens = number(each.value) or 0
        limit = number(longest.value) if longest else None
        if limit and tokens >= limit and longest:
            yield Finding(
                each.leg,
                "certain",
                (each.excerpt, longest.excerpt),
                f"kv_recompute_threshold ({tokens:g}) is not below the longest prompt ({limit:g}): "
                "no turn can ever reach it, so nothing is read back.",
                "Lower it (64 is the default; pdctl tune measures the right one).",
            )
            return
    below = _turns(evidence, "below_threshold")
    hits = _turns(evidence, "hit")
    if below and below[0] >= 20 and below[0] > 9 * (hits[0] if hits else 0):
        stated = setting(evidence, "threshold", "prefill")
        yield Finding(
            stated.leg if stated else below[2],
            "likely",
            (below[1], *((stated.excerpt,) if stated else ())),
            "Nearly every turn falls below kv_recompute_threshold, so it is recomputed.",
            "Compare the threshold with the length of your turns and lower it (64 is the default; "
            "pdctl tune measures the right one).",
            severity="warning",
        )


def _turns(evidence: Evidence, outcome: str) -> tuple[float, Excerpt, str] | None:
    """Turns with an outcome, how it shows, and the leg that counted them."""
    for leg in evidence.role("router", "prefill"):
        for name in (TURNS, "pd_engine_decisions_total"):
            if leg.metrics and (total := leg.metrics.value(name, outcome=outcome)) is not None:
                gain = leg.metrics.gain(name, outcome=outcome)
                shown = leg.metrics.excerpt(name, outcome=outcome)
                return (total if gain is None else gain), shown, leg.name
    return None


def _history(evidence: Evidence) -> Iterator[Answer]:
    yield from _edited(evidence)
    changed, hits = _turns(evidence, "history_changed"), _turns(evidence, "hit")
    if changed and changed[0] >= 10 and changed[0] > (hits[0] if hits else 0):
        yield Finding(
            changed[2],
            "likely",
            (changed[1], *((hits[1],) if hits else ())),
            "Most turns do not continue the turn before, token for token: clients edit or compact "
            "their history, or strip the reasoning that decode's blocks contain. Reading those "
            "blocks would give wrong text, so the prompt is recomputed.",
            "Send the assistant's answers back unchanged, reasoning included (reasoning_content "
            "and a template that renders it); compact history rarely, then start a new "
            "conversation id.",
            severity="warning",
        )


def _edited(evidence: Evidence) -> Iterator[Finding]:
    """Captured requests of one conversation of which the later does not continue the earlier."""
    before: dict[str, tuple[list[Any], Excerpt]] = {}
    for leg, capture in requests(evidence):
        body = _body(capture.text)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            continue
        name = str(body.get("conversation_id") or _first_words(messages))
        earlier = before.get(name)
        before[name] = (messages, Excerpt(capture.source, capture.text.strip()[:300]))
        if earlier is None or len(messages) <= len(earlier[0]):
            continue
        changed = next(
            (n for n, (a, b) in enumerate(zip(earlier[0], messages, strict=False)) if a != b), None
        )
        if changed is not None:
            yield Finding(
                leg.name,
                "likely",
                (earlier[1], before[name][1]),
                f"Message {changed + 1} of the conversation is another one in the next turn: from "
                "there on the prompt is new, so nothing behind that point can be reused. A time or "
                "an id in the system prompt does that to the whole history.",
                "Keep what was sent as it was: put what changes (time, state) into the newest "
                "message, not into the system prompt.",
                severity="warning",
            )
            return


def _body(text: str) -> dict[str, Any]:
    """The JSON of a captured request; nothing when it is cut."""
    try:
        body = json.loads(text[text.index("{") :])
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _first_words(messages: list[Any]) -> Any:
    user = (m for m in messages if isinstance(m, dict) and m.get("role") == "user")
    return next(user, {}).get("content")


CHECKS = (
    Check(
        "PD4504",
        "The threshold does not apply to prefill to decode",
        Category.SILENT_RECOMPUTE,
        "info",
        "threshold-not-for-p2d",
        _threshold_ignored,
        needs=("config|log",),
        patterns=(KV_TRANSFER_METRICS, *LOG_SETTINGS),
        explains=("PD7504",),
    ),
    Check(
        "PD4505",
        "The chat template changes the history",
        Category.SILENT_RECOMPUTE,
        "error",
        "template-changes-history",
        _template,
        needs=("http",),
        explains=("PD4512",),
    ),
    Check(
        "PD4506",
        "A KV block is longer than any prompt",
        Category.SILENT_RECOMPUTE,
        "warning",
        "block-longer-than-prompt",
        _inert_cache,
        needs=("log|config",),
        patterns=(BLOCK_SIZE_SET, *LOG_SETTINGS),
    ),
    Check(
        "PD4508",
        "The recompute threshold is above the prompts",
        Category.SILENT_RECOMPUTE,
        "error",
        "threshold-too-high",
        _threshold_too_high,
        needs=("config|metrics|log",),
        patterns=LOG_SETTINGS,
        explains=("PD4511",),
    ),
    Check(
        "PD4512",
        "Turns do not continue their history",
        Category.SILENT_RECOMPUTE,
        "warning",
        "history-changed",
        _history,
        needs=("metrics|http",),
    ),
)
