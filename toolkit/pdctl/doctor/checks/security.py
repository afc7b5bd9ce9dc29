"""Who may read whose KV."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.captures import HANDLE, answers, request_heads, requests, streams
from pdctl.doctor.checks.handshake import SIDE_PORTS
from pdctl.doctor.checks.lines import ENGINE_DEAD
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

_WHO = r"(?:tenant|caller|principal|user|requester|client)"
_IS = r"['\"]?\s*[=:]\s*['\"]?"
_WHOSE = r"(?:owner|stored_by|owned_by|belongs_to|created_by)"
CLAIM = Pattern(
    "claim-across-tenants",
    ("owner", "stored_by", "owned_by", "belongs_to", "created_by"),
    rf"(?i)\b{_WHO}{_IS}(?P<who>[\w.@/-]{{1,100}}).{{0,400}}\b{_WHOSE}{_IS}(?P<whose>[\w.@/-]+)",
)
CLAIM_REVERSED = Pattern(
    "claim-across-tenants-reversed",
    CLAIM.any_of,
    rf"(?i)\b{_WHOSE}{_IS}(?P<whose>[\w.@/-]{{1,100}}).{{0,400}}\b{_WHO}{_IS}(?P<who>[\w.@/-]+)",
)
DEVELOPMENT = Pattern(
    "development-endpoints", ("Development endpoints are enabled",), r"Development endpoints"
)
STRIPPED = "pd_router_client_kv_params_stripped_total"
FATAL = Pattern(
    "engine-fatal",
    ("AssertionError", "EngineCore encountered a fatal error", "TypeError"),
    r"EngineCore encountered a fatal error|\bAssertionError\b|\bTypeError\b",
)


def _other_tenant(evidence: Evidence) -> Iterator[Answer]:
    for pattern in (CLAIM, CLAIM_REVERSED):
        for leg in evidence.legs:
            hits = leg.hits.get(pattern.name)
            for hit in hits.first if hits else ():
                who, whose = hit.groups["who"], hit.groups["whose"]
                refused = re.search(r"(?i)refused|denied|rejected|403|miss\b|not used", hit.text)
                if (
                    who == whose
                    or refused
                    or not re.search(r"(?i)kv|handle|cache|claim|session", hit.text)
                ):
                    continue
                token = [
                    Excerpt(c.source, c.text.strip()[:300])
                    for each in evidence.legs
                    for c in each.http
                    if re.search(r"(?i)x-session|authorization", c.text)
                ]
                yield Finding(
                    leg.name,
                    "certain",
                    (hit.excerpt, *token[:1]),
                    f"{who} was given the KV handle of {whose}: the router finds conversations by "
                    "an id that the client chooses, and by that alone.",
                    "Key the store by the authenticated principal and the conversation, drop "
                    "kv_transfer_params that clients send, and bind session tokens to their "
                    "tenant (pd-router does, by router.tenant_header).",
                )
                return


_WORLD = re.compile(
    r"0\.0\.0\.0/0|::/0|(?<![\d.])0\.0\.0\.0(?![\d./])|\bany\b|LoadBalancer|NodePort"
)


def _side_channel_open(evidence: Evidence) -> Iterator[Answer]:
    reached = [
        (leg.name, command.excerpt)
        for leg in evidence.legs
        for command in leg.commands
        if re.search(r"\b(?:nc|ncat|nmap|telnet|curl)\b", command.line)
        and SIDE_PORTS.search(command.line + command.output)
        and re.search(r"(?i)succeeded|open\b|connected", command.output)
        and not re.search(
            r"\b(?:127\.|localhost|10\.|192\.168\.|172\.(?:1[6-9]|2\d|3[01])\.)", command.line
        )
    ]
    rules: list[tuple[str, Excerpt]] = []
    for leg in evidence.legs:
        text = leg.config.text if leg.config else ""
        if SIDE_PORTS.search(text) and re.search(r"0\.0\.0\.0/0|::/0", text):
            rules.append((leg.name, _line(leg.name, text, r"0\.0\.0\.0/0|::/0")))
        elif re.search(r"type:\s*(?:NodePort|LoadBalancer)", text) and SIDE_PORTS.search(text):
            rules.append((leg.name, _line(leg.name, text, r"NodePort|LoadBalancer")))
    if not reached and not rules:
        return
    found = reached or rules
    yield Finding(
        found[0][0],
        "certain" if rules and reached else "likely",
        tuple(excerpt for _, excerpt in (*rules[:2], *reached[:1])),
        "The NIXL side channel can be reached from outside: it answers anyone with agent metadata "
        "(addresses and keys of KV memory) and has no authentication; one malformed message stops "
        "its listener. KV traffic between nodes is not protected by design.",
        "Bind it to the private address (VLLM_NIXL_SIDE_CHANNEL_HOST), allow its ports (5600 and "
        "up) only from the legs' own security group, and make no NodePort or LoadBalancer for "
        "them; the same for the KV events port. From outside nc -zv HOST 5600 must fail.",
    )


def _line(leg: str, text: str, regex: str) -> Excerpt:
    line = next((each for each in text.splitlines() if re.search(regex, each)), text[:200])
    return Excerpt(f"{leg}/config.txt", line.strip())


_CHOOSES_LEG = re.compile(
    r"(?im)^(?:> )?(x-(?:prefiller|decoder|kv-cache-source)-(?:host-port|url|hosts?)):\s*\S+"
)


def _client_chooses_leg(evidence: Evidence) -> Iterator[Finding]:
    for leg, capture in request_heads(evidence, "client"):
        if header := _CHOOSES_LEG.search(capture.text):
            yield Finding(
                next((each.name for each in evidence.role("router")), leg.name),
                "likely",
                (Excerpt(capture.source, header[0]),),
                f"A client's request names the leg to take KV from ({header[1]}): where the router "
                "or sidecar obeys it, the client chooses to which address the deployment sends "
                "prompts and which engine's blocks are read.",
                "Remove such headers at the public side and let only the router set them; let the "
                "sidecar accept only the addresses of known legs.",
            )
            return


def _client_params(evidence: Evidence) -> Iterator[Answer]:
    yield from _client_chooses_leg(evidence)
    given = [
        capture
        for _, capture in requests(evidence, "client", DEPLOYMENT)
        if HANDLE.search(capture.text)
    ]
    dead = seen(evidence, ENGINE_DEAD, "prefill", "decode")
    fatal = seen(evidence, FATAL, "prefill", "decode")
    stripped = [
        leg for leg in evidence.role("router") if leg.metrics and leg.metrics.value(STRIPPED)
    ]
    obeyed = dead or fatal
    if given and (obeyed or not stripped):
        yield Finding(
            dead.leg if dead else fatal.leg,
            "likely" if obeyed else "possible",
            (
                Excerpt(given[0].source, given[0].text.strip()[:300]),
                *fatal.excerpts[:1],
                *dead.excerpts[:1],
            ),
            "kv_transfer_params of a client's request reach the engine: whoever can send them can "
            "read other conversations' blocks, pin blocks for ever, or end the engine"
            + (", as here." if obeyed else ". Nothing shows that the router drops them."),
            "Drop the field from every request at the public side (pd-router does and counts it in "
            f"{STRIPPED}) and let nobody but the router reach the engines' ports.",
        )


def _handle_leaks(evidence: Evidence) -> Iterator[Answer]:
    leaked = [
        (leg, capture)
        for leg, capture in (*answers(evidence, "client"), *streams(evidence, "client"))
        if HANDLE.search(capture.text) and "remote_" in capture.text
    ]
    if leaked:
        yield Finding(
            next((leg.name for leg in evidence.role("router")), leaked[0][0].name),
            "certain",
            (Excerpt(leaked[0][1].source, leaked[0][1].text.strip()[:400]),),
            "Clients are shown the KV handle (host, engine and block ids): with it and a way to an "
            "engine they read this conversation's blocks, or guess others.",
            "Use a router that takes the handle out of answers (pd-router does).",
        )


def _development(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, DEVELOPMENT)
    if found:
        yield Finding(
            found.leg,
            "certain",
            found.excerpts[:1],
            "The engine's development endpoints are on (VLLM_SERVER_DEV_MODE): whoever reaches its "
            "port can read all settings, reset caches and put the engine to sleep.",
            "Unset VLLM_SERVER_DEV_MODE where the port can be reached by others.",
            severity="info",
        )


CHECKS = (
    Check(
        "PD8001",
        "A handle crosses tenants",
        Category.SECURITY,
        "error",
        "handle-crosses-tenants",
        _other_tenant,
        needs=("log",),
        patterns=(CLAIM, CLAIM_REVERSED),
        explains=("PD5501",),
    ),
    Check(
        "PD8002",
        "The side channel is open to the outside",
        Category.SECURITY,
        "error",
        "side-channel-open",
        _side_channel_open,
        needs=("config|commands",),
        explains=("PD2001",),
    ),
    Check(
        "PD8003",
        "Transfer parameters of clients reach the engine",
        Category.SECURITY,
        "error",
        "client-params-honoured",
        _client_params,
        needs=("http",),
        patterns=(ENGINE_DEAD, FATAL),
        explains=("PD8505", "PD4510"),
    ),
    Check(
        "PD8005",
        "Development endpoints are on",
        Category.SECURITY,
        "info",
        "development-endpoints",
        _development,
        needs=("log",),
        patterns=(DEVELOPMENT,),
    ),
    Check(
        "PD8004",
        "Clients are shown the handle",
        Category.SECURITY,
        "error",
        "handle-shown-to-clients",
        _handle_leaks,
        needs=("http",),
    ),
)
