"""Dashboard 3: handles, and the memory they keep on decode."""

from pd_connector import contract
from pd_connector.contract import Outcome
from pd_connector.telemetry import (
    ENGINE_BLOCKS,
    ENGINE_DECISIONS,
    ENGINE_DECLINED,
    ENGINE_PINNED_BLOCKS,
    ENGINE_PINS,
    ENGINE_PINS_ENDED,
    ENGINE_REFUSED,
    ROUTER_HANDLE_AGE,
    ROUTER_HANDLE_TTL,
    ROUTER_HANDLES_BYTES,
    ROUTER_HANDLES_BYTES_LIMIT,
    ROUTER_HANDLES_DROPPED,
    ROUTER_HANDLES_HELD,
    ROUTER_HANDLES_LIMIT,
    ROUTER_HANDLES_SENT,
    ROUTER_HANDLES_STORED,
    ROUTER_TURNS,
)
from pdctl.observe.panel import ENGINE, RATE_INTERVAL, ROUTER, ROUTER_LEG, Board, Panel, Query, Row
from pdctl.observe.promql import quantile, rate, select, total

DECODE = *ROUTER_LEG, 'role="decode"'
BY_LEG = "deployment, leg"

BOARD = Board(
    "pd-handles",
    "pdctl / Handles and KV memory",
    "What the router holds for next turns, and what decode keeps for them.",
    (
        Row(
            "Handles in the router",
            (
                Panel(
                    "Handles held",
                    "none",
                    "About the number of conversations under way.",
                    "PdRouterMapNearBound",
                    (
                        Query(
                            total(ROUTER_HANDLES_HELD.name, *ROUTER_LEG, by="leg"),
                            "blocks on {{leg}}",
                        ),
                    ),
                    "stacked",
                    width=8,
                ),
                Panel(
                    "Share of the router's map in use",
                    "percentunit",
                    "Below 90 %; above, the oldest handles are about to be dropped.",
                    "PdRouterMapNearBound",
                    (
                        Query(
                            f"{total(ROUTER_HANDLES_HELD.name, *ROUTER)} / "
                            f"{total(ROUTER_HANDLES_LIMIT.name, *ROUTER)}",
                            "{{deployment}}: handles",
                        ),
                        Query(
                            f"{total(ROUTER_HANDLES_BYTES.name, *ROUTER)} / "
                            f"{total(ROUTER_HANDLES_BYTES_LIMIT.name, *ROUTER)}",
                            "{{deployment}}: their memory",
                        ),
                    ),
                    limit=0.9,
                    top=1.0,
                    width=8,
                ),
                Panel(
                    "Memory of the router's map",
                    "bytes",
                    "A few kilobytes per handle.",
                    "PdRouterMapNearBound",
                    (Query(total(ROUTER_HANDLES_BYTES.name, *ROUTER), "{{deployment}}"),),
                    width=8,
                ),
                Panel(
                    "Age of handles when claimed, and their time to live",
                    "s",
                    "p99 well below the time to live. Close to it, raise decode_ttl and "
                    "handle_ttl: turns are about to expire.",
                    "PdHandlesExpire",
                    (
                        *(
                            Query(
                                quantile(share, ROUTER_HANDLE_AGE.name, RATE_INTERVAL, *ROUTER),
                                f"p{share * 100:.0f}",
                            )
                            for share in (0.5, 0.9, 0.99)
                        ),
                        Query(
                            f"max({select(ROUTER_HANDLE_TTL.name, *ROUTER)})",
                            "time to live",
                        ),
                    ),
                ),
                Panel(
                    "Handles stored and sent",
                    "reqps",
                    "Stored follows the turns; sent is stored less one per conversation. Stored "
                    "at zero under load: decode returns no handles.",
                    "PdAlwaysMiss",
                    (
                        Query(rate(ROUTER_HANDLES_STORED.name, RATE_INTERVAL, *ROUTER), "stored"),
                        Query(rate(ROUTER_HANDLES_SENT.name, RATE_INTERVAL, *ROUTER), "sent"),
                    ),
                ),
                Panel(
                    "Handles forgotten unused",
                    "reqps",
                    "expired is the rate at which conversations end; evicted, leg_restarted and "
                    "leg_down are zero.",
                    "PdRouterMapNearBound",
                    (
                        Query(
                            rate(ROUTER_HANDLES_DROPPED.name, RATE_INTERVAL, *ROUTER, by="reason"),
                            "{{reason}}",
                        ),
                    ),
                ),
                Panel(
                    "Too late",
                    "reqps",
                    "Zero turns and none declined: they came after decode had freed their blocks. "
                    "vLLM's count on decode also has turns that nobody continued.",
                    "PdHandlesExpire",
                    (
                        Query(
                            rate(
                                ROUTER_TURNS.name,
                                RATE_INTERVAL,
                                *ROUTER,
                                f'outcome="{Outcome.EXPIRED.value}"',
                            ),
                            "turns with outcome expired",
                        ),
                        Query(
                            rate(ENGINE_DECLINED.name, RATE_INTERVAL, *ENGINE, by="leg"),
                            "declined by {{leg}}",
                        ),
                        Query(
                            rate(contract.ENGINE_NIXL_EXPIRED, RATE_INTERVAL, *ENGINE, by="leg"),
                            "expired on {{leg}} (vLLM, unread ones included)",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "KV memory on decode",
            (
                Panel(
                    "Share of KV blocks kept for next turns",
                    "percentunit",
                    "Below 80 %. Above, new requests wait or are preempted: lower decode_ttl or "
                    "add decode legs.",
                    "PdPinnedKvHigh",
                    (
                        Query(
                            f"{total(ENGINE_PINNED_BLOCKS.name, *DECODE, by=BY_LEG)} / "
                            f"{total(ENGINE_BLOCKS.name, *DECODE, by=BY_LEG)}",
                            "{{leg}}",
                        ),
                    ),
                    limit=0.8,
                    top=1.0,
                ),
                Panel(
                    "KV cache in use (vLLM)",
                    "percentunit",
                    "Below 90 %, with room for the next long prompt.",
                    "PdPinnedKvFull",
                    (Query(total(contract.ENGINE_KV_USAGE, *ENGINE, by=BY_LEG), "{{leg}}"),),
                    limit=0.9,
                    top=1.0,
                ),
                Panel(
                    "Finished turns whose blocks are kept",
                    "none",
                    "About the number of conversations under way.",
                    "PdPinnedKvHigh",
                    (Query(total(ENGINE_PINS.name, *DECODE, by="leg"), "{{leg}}"),),
                ),
                Panel(
                    "Why blocks were freed",
                    "reqps",
                    "read and successor: reuse works. expired: nobody came back. high_water: "
                    "memory is short.",
                    "PdPinnedTurnsCrowdedOut",
                    (
                        Query(
                            rate(ENGINE_PINS_ENDED.name, RATE_INTERVAL, *DECODE, by="reason"),
                            "{{reason}}",
                        ),
                    ),
                    "stacked",
                ),
                Panel(
                    "Preemptions",
                    "reqps",
                    "Zero. A preempted request computes its KV again.",
                    "decode-preempts",
                    (
                        Query(
                            rate(contract.ENGINE_PREEMPTIONS, RATE_INTERVAL, *ENGINE, by="leg"),
                            "{{leg}}",
                        ),
                    ),
                ),
                Panel(
                    "What prefill decided",
                    "reqps",
                    "The same shares as the router's outcomes; they differ when something sits "
                    "between router and prefill.",
                    "PdReuseStopped",
                    (
                        Query(
                            rate(ENGINE_DECISIONS.name, RATE_INTERVAL, *ROUTER, by="outcome"),
                            "{{outcome}}",
                        ),
                    ),
                    "stacked",
                ),
                Panel(
                    "Handles that engines refused",
                    "reqps",
                    "Zero. forged, altered and foreign handles did not come from this deployment.",
                    "client-params-honoured",
                    (
                        Query(
                            rate(ENGINE_REFUSED.name, RATE_INTERVAL, *ENGINE, by="leg, reason"),
                            "{{leg}}: {{reason}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
