"""Whether the turns of a conversation name it and find each other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pd_connector.contract import CONVERSATION_HEADERS
from pdctl.doctor.checks.captures import answers, request_heads, requests
from pdctl.doctor.checks.reading import Seen, seen
from pdctl.doctor.evidence.facts import Capture, Evidence, LegEvidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

NO_SESSION = Pattern(
    "turn-without-session",
    ("session=", "conversation=", "session_id=", "conversation_id=", "x-session-id"),
    r"(?i)(?:turn[= ]?\s?(?P<turn>\d+).{0,400})?(?:session|conversation)(?:_id)?[=:]\s?"
    r"(?:-|none|null|\"\"|''|<none>|missing|unknown)(?=[\s,;]|$)"
    r"(?:.{0,400}?(?:decode=|->\s*)(?P<decode>\S+))?",
)
SESSION = Pattern(
    "turn-with-session",
    NO_SESSION.any_of,
    r"(?i)(?:session|conversation)(?:_id)?[=:]\s?(?!-|none|null|\"\"|''|<none>|missing|unknown)\w",
)
NO_KEY = Pattern(
    "session-key-not-found",
    (
        "ession key",
        "ession id",
        "ession header",
        "onversation id",
        "onversation header",
        "ession_id not",
        "ession_id missing",
        "ession-id not",
        "ession-id missing",
        "onversation_id not",
        "onversation_id missing",
        "ash key",
    ),
    r"(?i)\b(?:session|conversation|hash)[ _-](?:key|id|header)\b.{0,60}\b(?:not found|missing"
    r"|absent|not present|not provided)\b"
    r"|\bno (?:session|conversation|hash)[ _-](?:key|id|header)\b(?!s? (?:configured|needed))",
)
STICKY_SKIPPED = Pattern(
    "stickiness-skipped",
    ("ticky", "ffinity", "STICKY", "AFFINITY"),
    r"(?i)(?:sticky|affinity)\b.{0,400}"
    r"(?:not supported|unsupported|bypass|ignor|skip|disabled|no effect)"
    r".{0,400}(?:PD\b|P/D|disaggregat|prefill)|(?:PD\b|P/D|disaggregat|prefill).{0,400}"
    r"(?:not supported|"
    r"unsupported|bypass|ignor|skip|disabled).{0,400}(?:sticky|affinity)"
    r"|(?:sticky|affinity).{0,400}(?:PD\b|P/D|disaggregat).{0,400}(?:bypass|ignor|skip)"
    r"|(?:sticky|affinity)\w* (?:ignored|bypassed|skipped):.{0,400}(?:prefill|disaggregat)",
)

_SESSION_HEADER = re.compile(
    rf"(?im)^\s*(?!#)(?:{'|'.join(map(re.escape, CONVERSATION_HEADERS))}|x-session-token|x-user-id"
    r"|x-routing-key|session-id)\s*:"
)
_SESSION_FIELD = re.compile(r'"(?:conversation_id|session_id|session_params|previous_response_id)"')
_HISTORY = re.compile(r'"role"\s*:\s*"assistant"')


def _no_session(evidence: Evidence) -> Iterator[Answer]:
    unnamed = seen(evidence, NO_SESSION)
    bare = [(leg, c) for leg, c in _heads(evidence) if not _names_session(c)]
    named = [c for _, c in _heads(evidence) if _names_session(c)]
    missed = [found for leg in evidence.role("router") if (found := _only_misses(leg))]
    places = set(unnamed.counts("decode"))
    later = any(int(turn) > 1 for turn in unnamed.counts("turn"))
    repeated = unnamed.count >= 2 and (later or len(places) > 1) and not seen(evidence, SESSION)
    keyless = seen(evidence, NO_KEY, "router", DEPLOYMENT)
    if keyless and not repeated and not seen(evidence, SESSION) and not named:
        yield _unnamed(keyless)
        return
    if not repeated and not (bare and not named and (unnamed or missed)):
        return
    spread = f" {len(places)} decode legs served them." if len(places) > 1 else ""
    yield Finding(
        next((leg.name for leg in evidence.role("router")), DEPLOYMENT),
        "certain" if repeated and bare else "likely",
        (
            *unnamed.excerpts[:2],
            *(Excerpt(c.source, c.text.strip()[:300]) for _, c in bare[:1]),
            *missed[:1],
        )[:4],
        "Clients do not name their conversation: no conversation_id in the body and no "
        "X-Session-ID or X-Conversation-ID header. The router cannot find the turn before (every "
        f"turn is a miss), and hashing falls back to something that changes every turn.{spread}",
        "Send conversation_id in the body or X-Session-ID from client or gateway "
        "(benchmark_serving_multi_turn.py: --send-conversation-id). Count turns without it: "
        'pd_router_turns_total{outcome="miss"} on second turns.',
    )


def _unnamed(keyless: Seen) -> Finding:
    return Finding(
        keyless.leg,
        "likely",
        keyless.excerpts,
        "The router looks for the conversation where these requests do not name it, and takes "
        "something else instead: the next turn goes to another leg, and nothing of the turn "
        "before is found.",
        "Send the name that the router looks for (the message or its configuration says which "
        "header or field), from client or gateway on every turn, and see that no proxy drops it.",
        severity=None if keyless.count >= 2 else "warning",
    )


def _heads(evidence: Evidence) -> list[tuple[LegEvidence, Capture]]:
    """Requests of clients of which the headers or the conversation so far are shown."""
    found = list(request_heads(evidence, "client", "router", DEPLOYMENT))
    found += [
        (leg, capture)
        for leg, capture in requests(evidence, "client", "router", DEPLOYMENT)
        if _HISTORY.search(capture.text) and (leg, capture) not in found
    ]
    return [(leg, c) for leg, c in found if "/metrics" not in c.text and "/health" not in c.text]


def _names_session(capture: Capture) -> bool:
    return bool(_SESSION_HEADER.search(capture.text) or _SESSION_FIELD.search(capture.text))


def _only_misses(leg: LegEvidence) -> Excerpt | None:
    """Turns that all miss, with nothing stored."""
    if not leg.metrics:
        return None
    misses = leg.metrics.value("pd_router_turns_total", outcome="miss") or 0
    others = sum(
        leg.metrics.value("pd_router_turns_total", outcome=each) or 0
        for each in ("hit", "expired", "below_threshold", "failed", "history_changed")
    )
    stored = leg.metrics.value("pd_router_handles_stored_total")
    if misses >= 20 and others == 0 and not stored:
        return leg.metrics.excerpt("pd_router_turns_total", outcome="miss")
    return None


def _stickiness_skipped(evidence: Evidence) -> Iterator[Answer]:
    skipped = seen(evidence, STICKY_SKIPPED)
    asked = evidence.text(r"(?i)sticky|affinity", "config")
    split = evidence.text(r"(?i)pdGroup|disaggregat|prefill", "config")
    if skipped:
        yield Finding(
            skipped.leg,
            "certain",
            (*skipped.excerpts[:2], *(each.excerpt for each in asked[:1])),
            "Session stickiness is configured, and the router does not do it for models that are "
            "split into prefill and decode: it says so in one line of its log and goes on.",
            "Use a router that binds a conversation to its pair (pd-router), or pin by header in "
            "front of this one. In kthena, sessionSticky together with pdGroup has no effect.",
        )
    elif (
        asked
        and split
        and any(
            "kthena" in e.excerpt.text or "ModelServer" in e.excerpt.text
            for e in evidence.text(".", "config")
        )
    ):
        yield Finding(
            asked[0].leg,
            "possible",
            (asked[0].excerpt, split[0].excerpt),
            "sessionSticky is set on a model that is split into prefill and decode: kthena's "
            "router ignores it there.",
            "Use a router that binds a conversation to its pair, or pin by header in front of it.",
        )


_REASONED = re.compile(r'"reasoning(?:_content)?"\s*:\s*"[^"]|<think>')


def _stripped_history(evidence: Evidence) -> Iterator[Answer]:
    """A handle that is offered for a history without the reasoning its blocks contain."""
    reasoned = [
        c for _, c in answers(evidence, "decode", "client", "router") if _REASONED.search(c.text)
    ]
    offered = [
        (leg, c)
        for leg, c in requests(evidence, "prefill", "router")
        if re.search(r'"remote_block_ids"\s*:\s*\[+\s*\d', c.text)
        and _HISTORY.search(c.text)
        and not _REASONED.search(c.text)
    ]
    if reasoned and offered:
        yield Finding(
            next((leg.name for leg in evidence.role("router")), offered[0][0].name),
            "likely",
            (
                Excerpt(reasoned[0].source, reasoned[0].text.strip()[:300]),
                Excerpt(offered[0][1].source, offered[0][1].text.strip()[:300]),
            ),
            "The router offers a turn's handle for another history: decode's blocks contain the "
            "reasoning, the next prompt does not. The engine never compares tokens and reads the "
            "wrong blocks: wrong text, HTTP 200.",
            "Use a handle only when the prompt continues the turn token for token (pd-router and "
            "pdctl's connector prove it), or send reasoning_content back with a template that "
            "renders it.",
        )


CHECKS = (
    Check(
        "PD5501",
        "Turns do not name their conversation",
        Category.ROUTER_SESSION,
        "error",
        "no-conversation-id",
        _no_session,
        needs=("log|http|metrics",),
        patterns=(NO_SESSION, SESSION, NO_KEY),
        explains=("PD5504",),
    ),
    Check(
        "PD5502",
        "Stickiness is skipped for prefill/decode",
        Category.ROUTER_SESSION,
        "error",
        "stickiness-skipped",
        _stickiness_skipped,
        needs=("log|config",),
        patterns=(STICKY_SKIPPED,),
        explains=("PD5504",),
    ),
    Check(
        "PD5507",
        "A handle is offered for another history",
        Category.ROUTER_SESSION,
        "error",
        "handle-for-other-history",
        _stripped_history,
        needs=("http",),
        explains=("PD7505",),
    ),
)
