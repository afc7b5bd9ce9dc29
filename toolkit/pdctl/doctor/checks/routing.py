"""What the router makes of conversations: its policy, its store, its blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.settings import config_values, number
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding

_AFFINITY_FREE = re.compile(
    r"round[_-]?robin|random|least|power_of_two|shortest|follow_bootstrap_room"
)


def _store_per_replica(evidence: Evidence) -> Iterator[Answer]:
    replicas: list[tuple[float, Excerpt]] = []
    memory: list[Excerpt] = []
    sticky = False
    for leg in evidence.legs:
        for path, value in config_values(leg):
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
            for path, value in config_values(leg)
            if re.search(r"(?:^|[._])(?:policy|load_balanc\w*|lb_method)$", path.lower())
            and "failure" not in path
            and "prefill" not in path.lower()
        ]
        policies = [each for each in policies if "decode" in each[0].lower()] or policies
        free = [each for each in policies if _AFFINITY_FREE.search(each[1])]
        legs = [
            v
            for p, v in config_values(leg)
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
        for path, value in config_values(leg):
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


CHECKS = (
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
        "PD5505",
        "The router forgets handles",
        Category.ROUTER_SESSION,
        "warning",
        "handles-forgotten",
        _handles_lost,
        needs=("metrics",),
    ),
)
