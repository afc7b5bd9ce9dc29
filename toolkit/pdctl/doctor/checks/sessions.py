"""Whether the turns of a conversation find each other in the router."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pd_connector.contract import CONVERSATION_HEADERS
from pdctl.doctor.checks.captures import answers, request_heads, requests
from pdctl.doctor.checks.reading import number, seen
from pdctl.doctor.evidence.facts import Capture, Evidence, LegEvidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

NO_SESSION = Pattern(
    "turn-without-session",
    ("session=", "conversation=", "session_id=", "conversation_id=", "x-session-id"),
    r"(?i)(?:turn[= ]?\s?(?P<turn>\d+).*)?(?:session|conversation)(?:_id)?[=:]\s?"
    r"(?:-|none|null|\"\"|''|<none>|missing|unknown)(?=[\s,;]|$)"
    r"(?:.*?(?:decode=|->\s*)(?P<decode>\S+))?",
)
SESSION = Pattern(
    "turn-with-session",
    NO_SESSION.any_of,
    r"(?i)(?:session|conversation)(?:_id)?[=:]\s?(?!-|none|null|\"\"|''|<none>|missing|unknown)\w",
)
STICKY_SKIPPED = Pattern(
    "stickiness-skipped",
    ("ticky", "ffinity", "STICKY", "AFFINITY"),
    r"(?i)(?:sticky|affinity)\b.*(?:not supported|unsupported|bypass|ignor|skip|disabled|no effect)"
    r".*(?:PD\b|P/D|disaggregat|prefill)|(?:PD\b|P/D|disaggregat|prefill).*(?:not supported|"
    r"unsupported|bypass|ignor|skip|disabled).*(?:sticky|affinity)"
    r"|(?:sticky|affinity).*(?:PD\b|P/D|disaggregat).*(?:bypass|ignor|skip)"
    r"|(?:sticky|affinity)\w* (?:ignored|bypassed|skipped):.*(?:prefill|disaggregat)",
)

_SESSION_HEADER = re.compile(
    rf"(?im)^\s*(?!#)(?:{'|'.join(map(re.escape, CONVERSATION_HEADERS))}|x-session-token|x-user-id"
    r"|x-routing-key|session-id)\s*:"
)
_SESSION_FIELD = re.compile(r'"(?:conversation_id|session_id|session_params|previous_response_id)"')
_HISTORY = re.compile(r'"role"\s*:\s*"assistant"')
_AFFINITY_FREE = re.compile(
    r"round[_-]?robin|random|least|power_of_two|shortest|follow_bootstrap_room"
)


def _no_session(evidence: Evidence) -> Iterator[Answer]:
    unnamed = seen(evidence, NO_SESSION)
    bare = [(leg, c) for leg, c in _heads(evidence) if not _names_session(c)]
    named = [c for _, c in _heads(evidence) if _names_session(c)]
    missed = [found for leg in evidence.role("router") if (found := _only_misses(leg))]
    places = set(unnamed.counts("decode"))
    later = any(int(turn) > 1 for turn in unnamed.counts("turn"))
    repeated = unnamed.count >= 2 and (later or len(places) > 1) and not seen(evidence, SESSION)
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


def _store_per_replica(evidence: Evidence) -> Iterator[Answer]:
    replicas: list[tuple[float, Excerpt]] = []
    memory: list[Excerpt] = []
    sticky = False
    for leg in evidence.legs:
        for path, value in leg.config.values if leg.config else ():
            words = path.lower()
            mine = leg.role == "router" or re.search(r"router|proxy|gateway|frontend|epp", words)
            if not mine:
                continue
            shown = Excerpt(f"{leg.name}/config.txt", f"{path}: {value}")
            last = words.rpartition(".")[2]
            if last in ("replicas", "replica_count", "replicacount", "workers") and number(value):
                replicas.append((number(value) or 1, shown))
            if re.search(r"store|affinity_backend|cache_backend", last) and re.search(
                r"(?i)memory|local|process|dashmap", str(value)
            ):
                memory.append(shown)
            if "affinity" in last and re.search(r"(?i)clientip|cookie|header", str(value)):
                sticky = True
            if re.search(r"(?i)redis|etcd|valkey|shared", str(value)):
                return
    routers = evidence.role("router")
    several = [each for each in replicas if each[0] > 1]
    if not several and len(routers) < 2:
        return
    if (
        sticky
        or (not memory and not several)
        or (not memory and len(routers) < 2 and evidence.spec)
    ):
        return
    count = f"{several[0][0]:g}" if several else str(len(routers))
    if not memory and not several:
        return
    yield Finding(
        routers[0].name if routers else DEPLOYMENT,
        "likely" if memory else "possible",
        (*(shown for _, shown in several[:1]), *memory[:1]),
        f"{count} router replicas each keep their own store of conversations in memory: a turn "
        "that reaches another replica than the turn before finds nothing there.",
        "Share the store (pd-router with Redis), or pin conversations to a replica in front of "
        "them by session header (consistent hash, not round robin).",
        severity="error" if memory else "warning",
    )


def _no_affinity(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.legs:
        if not leg.config or not (leg.role == "router" or "router" in leg.config.text):
            continue
        policies = [
            (path, str(value))
            for path, value in leg.config.values
            if re.search(r"(?:^|[._])(?:policy|load_balanc\w*|lb_method)$", path.lower())
            and "failure" not in path
            and "prefill" not in path.lower()
        ]
        policies = [each for each in policies if "decode" in each[0].lower()] or policies
        free = [each for each in policies if _AFFINITY_FREE.search(each[1])]
        legs = [
            v
            for p, v in leg.config.values
            if re.search(r"(?:^|\.)decod\w*(?:_hosts|_urls)?$", p.lower())
        ]
        several = (
            len(legs) > 1
            or any(isinstance(v, list) and len(v) > 1 for v in legs)
            or len(evidence.role("decode")) > 1
        )
        if free and several:
            yield Finding(
                leg.name,
                "likely",
                tuple(Excerpt(f"{leg.name}/config.txt", f"{p}: {v}") for p, v in free[:2]),
                f"The router spreads turns over several decode legs with policy {free[0][1]}, "
                "which knows no conversations: the next turn mostly lands where its history isn't.",
                "Use a policy that keeps a conversation on its pair (consistent hash on "
                "X-Session-ID, or pd-router), and send a session id.",
            )


def _handles_lost(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.role("router"):
        if not leg.metrics:
            continue
        for reason, why in (
            ("evicted", "its store is full"),
            ("leg_restarted", "decode legs were restarted"),
        ):
            lost = leg.metrics.gain("pd_router_handles_dropped_total", reason=reason)
            stored = leg.metrics.gain("pd_router_handles_stored_total") or 0
            if lost and lost >= 10 and lost > 0.2 * stored:
                yield Finding(
                    leg.name,
                    "certain",
                    (leg.metrics.excerpt("pd_router_handles_dropped_total", reason=reason),),
                    f"The router forgets handles before their next turn: {why}.",
                    "Raise the router's limit of handles (pd_router_handles_limit) above the "
                    "number of live conversations, or lower its TTL."
                    if reason == "evicted"
                    else "Find out why decode restarts: pdctl status SPEC, pdctl logs SPEC LEG.",
                    severity="warning",
                )


_BLOCK_KEYS = re.compile(
    r"(?:^|[._])(?:tokens_per_block|block_?size(?:_?tokens)?|hash_block_size|page_size)$",
    re.IGNORECASE,
)


def _other_blocks(evidence: Evidence) -> Iterator[Answer]:
    """A router that hashes prompts in other blocks than the engines cache them in."""
    found: dict[str, tuple[float, Excerpt, str]] = {}
    for leg in evidence.legs:
        for path, value in leg.config.values if leg.config else ():
            size = number(value)
            plain = path.replace("-", "_")
            if not size or isinstance(value, bool) or not _BLOCK_KEYS.search(plain):
                continue
            words = set(re.split(r"[^a-z]+", path.lower()))
            side = (
                "router"
                if leg.role == "router" or words & {"router", "epp", "scorer"}
                else "engine"
            )
            if (
                leg.role == DEPLOYMENT
                and side == "engine"
                and not words & {"prefill", "decode", "engine"}
            ):
                continue
            found.setdefault(
                side, (size, Excerpt(f"{leg.name}/config.txt", f"{path}: {value}"), leg.name)
            )
    if len(found) == 2 and found["router"][0] != found["engine"][0]:
        router, engine = found["router"], found["engine"]
        yield Finding(
            router[2],
            "likely",
            (router[1], engine[1]),
            f"The router hashes prompts in blocks of {router[0]:g} tokens, engines cache blocks "
            f"of {engine[0]:g}: their hashes never match, so prefix-aware routing sees no hit and "
            "balances by load alone.",
            "Give the router the engines' block size.",
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
        patterns=(NO_SESSION, SESSION),
        explains=("PD4562", "PD5504", "PD5560"),
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
        "PD5503",
        "Each router replica has its own store",
        Category.ROUTER_SESSION,
        "error",
        "store-per-replica",
        _store_per_replica,
        needs=("config",),
    ),
    Check(
        "PD5504",
        "The router's policy knows no conversations",
        Category.ROUTER_SESSION,
        "error",
        "policy-without-affinity",
        _no_affinity,
        needs=("config",),
    ),
    Check(
        "PD5506",
        "Router and engines count blocks differently",
        Category.ROUTER_SESSION,
        "warning",
        "router-block-size",
        _other_blocks,
        needs=("config",),
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
    Check(
        "PD5505",
        "The router forgets handles",
        Category.ROUTER_SESSION,
        "warning",
        "handles-forgotten",
        _handles_lost,
        needs=("metrics",),
    ),
)
