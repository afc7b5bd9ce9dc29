"""Dashboard 4: the router and the legs behind it."""

from pd_connector import contract
from pd_connector.telemetry import (
    ENGINE_REJECTED,
    ENGINE_SPANS_DROPPED,
    ROUTER_ENDINGS,
    ROUTER_INFO,
    ROUTER_LEG_REQUESTS,
    ROUTER_LEG_RESTARTS,
    ROUTER_LEG_TOKENS,
    ROUTER_LEG_UP,
    ROUTER_PAIR_UP,
    ROUTER_PREFILL,
    ROUTER_PREFILL_RETRIES,
    ROUTER_REQUESTS,
    ROUTER_SPANS_DROPPED,
    ROUTER_STRIPPED,
)
from pdctl.observe.conditions import JOB
from pdctl.observe.panel import ENGINE, RATE_INTERVAL, ROUTER, ROUTER_LEG, Board, Panel, Query, Row
from pdctl.observe.promql import quantile, rate, select, total

BOARD = Board(
    "pd-legs",
    "pdctl / Router and legs",
    "Load, errors, queueing, placement, and which legs and pairs work.",
    (
        Row(
            "Health",
            (
                Panel(
                    "Legs that answer the router",
                    "none",
                    "1 for each leg.",
                    "PdLegDown",
                    (Query(select(ROUTER_LEG_UP.name, *ROUTER_LEG), "{{leg}}"),),
                    "stat",
                    width=8,
                ),
                Panel(
                    "Pairs whose transfers work",
                    "none",
                    "1 for each pair.",
                    "PdPairUnhealthy",
                    (
                        Query(
                            select(ROUTER_PAIR_UP.name, *ROUTER),
                            "{{decode_leg}} and {{prefill_leg}}",
                        ),
                    ),
                    "stat",
                    width=8,
                ),
                Panel(
                    "Scraped by Prometheus",
                    "none",
                    "1 for each leg.",
                    "PdScrapeMissing",
                    (Query(select("up", f'job="{JOB}"', *ENGINE), "{{leg}}"),),
                    "stat",
                    width=8,
                ),
                Panel(
                    "Settings of the router",
                    "none",
                    "bidirectional and connector as on the engines.",
                    "PdBidirectionalDisagree",
                    (Query(select(ROUTER_INFO.name, *ROUTER), "{{deployment}}"),),
                    "table",
                    by=("deployment", *ROUTER_INFO.labels),
                ),
                Panel(
                    "Restarts of legs",
                    "none",
                    "No step that you did not make. A restart empties what the leg kept.",
                    "PdLegDown",
                    (Query(total(ROUTER_LEG_RESTARTS.name, *ROUTER_LEG, by="leg"), "{{leg}}"),),
                ),
            ),
        ),
        Row(
            "Load and errors",
            (
                Panel(
                    "Requests by status",
                    "reqps",
                    "2xx almost only; 4xx are the clients', 5xx are ours.",
                    "PdLegDown",
                    (
                        Query(
                            rate(ROUTER_REQUESTS.name, RATE_INTERVAL, *ROUTER, by="path, status"),
                            "{{status}} {{path}}",
                        ),
                    ),
                    "stacked",
                ),
                Panel(
                    "How turns ended",
                    "reqps",
                    "ok; client_gone is the clients' doing, broken_stream and error are ours.",
                    "PdLegDown",
                    (
                        Query(
                            rate(ROUTER_ENDINGS.name, RATE_INTERVAL, *ROUTER, by="ending"),
                            "{{ending}}",
                        ),
                    ),
                    "stacked",
                ),
                Panel(
                    "Prefills repeated without their handle",
                    "reqps",
                    "Zero: each cost its user a failed try.",
                    "PdTransferFailures",
                    (
                        Query(
                            rate(
                                ROUTER_PREFILL_RETRIES.name,
                                RATE_INTERVAL,
                                *ROUTER_LEG,
                                by="leg, reason",
                            ),
                            "{{leg}}: {{reason}}",
                        ),
                    ),
                ),
                Panel(
                    "Transfer parameters that clients sent",
                    "reqps",
                    "Zero: they are stripped by the router and answered with 400 by engines; "
                    "somebody is trying.",
                    "client-params-honoured",
                    (
                        Query(
                            rate(ROUTER_STRIPPED.name, RATE_INTERVAL, *ROUTER),
                            "stripped by the router",
                        ),
                        Query(
                            rate(ENGINE_REJECTED.name, RATE_INTERVAL, *ENGINE, by="leg, reason"),
                            "rejected by {{leg}}: {{reason}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Queueing and placement",
            (
                Panel(
                    "Requests in flight per leg",
                    "none",
                    "Alike on legs of a role; one far above the others is badly placed or slow.",
                    "PdTtftBurnsSlowly",
                    (
                        Query(
                            select(ROUTER_LEG_REQUESTS.name, *ROUTER_LEG),
                            "{{leg}}",
                        ),
                    ),
                ),
                Panel(
                    "Prompt tokens in flight per leg",
                    "short",
                    "Alike on legs of a role.",
                    "PdTtftBurnsSlowly",
                    (Query(select(ROUTER_LEG_TOKENS.name, *ROUTER_LEG), "{{leg}}"),),
                ),
                Panel(
                    "Requests running and waiting (vLLM)",
                    "none",
                    "Waiting near zero. deferred that does not go away is a read that hangs.",
                    "PdTtftBurnsSlowly",
                    (
                        Query(total(contract.ENGINE_RUNNING, *ENGINE, by="leg"), "{{leg}} running"),
                        Query(
                            total(contract.ENGINE_WAITING_BY_REASON, *ENGINE, by="leg, reason"),
                            "{{leg}} waiting: {{reason}}",
                        ),
                    ),
                ),
                Panel(
                    "Time in the engine's queue (p90)",
                    "s",
                    "Milliseconds; more means too few legs of that role.",
                    "PdTtftBurnsSlowly",
                    (
                        Query(
                            quantile(
                                0.9,
                                contract.ENGINE_QUEUE_SECONDS,
                                RATE_INTERVAL,
                                *ENGINE,
                                by="leg",
                            ),
                            "{{leg}}",
                        ),
                    ),
                ),
                Panel(
                    "Prefills per leg",
                    "reqps",
                    "Alike on all prefill legs, or as the placement policy means it.",
                    "PdPairUnhealthy",
                    (
                        Query(
                            rate(
                                f"{ROUTER_PREFILL.name}_count",
                                RATE_INTERVAL,
                                *ROUTER_LEG,
                                by="leg",
                            ),
                            "{{leg}}",
                        ),
                    ),
                    "stacked",
                ),
                Panel(
                    "Prefill time per leg",
                    "s",
                    "Alike on all prefill legs; p99 within the TTFT objective.",
                    "PdTtftBurnsFast",
                    tuple(
                        Query(
                            quantile(
                                share, ROUTER_PREFILL.name, RATE_INTERVAL, *ROUTER_LEG, by="leg"
                            ),
                            f"p{share * 100:.0f} {{{{leg}}}}",
                            exemplars=True,
                        )
                        for share in (0.5, 0.99)
                    ),
                ),
                Panel(
                    "Generated tokens",
                    "short",
                    "Follows the load.",
                    "PdLegDown",
                    (
                        Query(
                            rate(
                                contract.ENGINE_GENERATION_TOKENS,
                                RATE_INTERVAL,
                                *ENGINE,
                                by="leg",
                            ),
                            "{{leg}} per second",
                        ),
                    ),
                ),
                Panel(
                    "Spans lost",
                    "none",
                    "Zero; else the collector is down or too slow, and traces have holes.",
                    "PdScrapeMissing",
                    (
                        Query(total(ROUTER_SPANS_DROPPED.name, *ROUTER), "router"),
                        Query(total(ENGINE_SPANS_DROPPED.name, *ENGINE, by="leg"), "{{leg}}"),
                    ),
                ),
            ),
        ),
    ),
)
