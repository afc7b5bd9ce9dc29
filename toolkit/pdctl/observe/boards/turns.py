"""Dashboard 1: what users wait for, and what became of their prompts."""

from pd_connector import contract
from pd_connector.contract import Outcome
from pd_connector.telemetry import (
    ROUTER_HANDLES_REFUSED,
    ROUTER_INFO,
    ROUTER_ROUTES,
    ROUTER_TOKENS,
    ROUTER_TTFT,
    ROUTER_TURNS,
)
from pdctl.observe.panel import OBJECTIVE, RANGE, RATE_INTERVAL, ROUTER, Board, Panel, Query, Row
from pdctl.observe.promql import increase, mean, quantile, rate, select, total

LATER = 'turn!="1"'
HIT = f'outcome="{Outcome.HIT.value}"'
NOT_HIT = f'outcome!="{Outcome.HIT.value}"'


def _quantiles(by: str, legend: str) -> tuple[Query, ...]:
    return tuple(
        Query(
            quantile(share, ROUTER_TTFT.name, RATE_INTERVAL, *ROUTER, by=by),
            f"p{share * 100:.0f}, {legend}",
            exemplars=True,
        )
        for share in (0.5, 0.9, 0.99)
    )


def _on_and_off() -> Query:
    """TTFT of later turns by the router's setting, so that an ON and an OFF deployment compare."""
    buckets = select(f"{ROUTER_TTFT.name}_bucket", *ROUTER, LATER)
    info = select(ROUTER_INFO.name, *ROUTER)
    joined = (
        f"rate({buckets}[{RATE_INTERVAL}]) "
        f"* on (deployment, instance) group_left (bidirectional) {info}"
    )
    return Query(
        f"histogram_quantile(0.5, sum by (le, bidirectional) ({joined}))",
        "bidirectional {{bidirectional}}",
    )


def _cost() -> Query:
    """Mean TTFT of later turns that were not read back, less that of those that were."""
    by = "deployment, prompt"
    slow = mean(ROUTER_TTFT.name, RANGE, *ROUTER, LATER, NOT_HIT, by=f"{by}, outcome")
    fast = mean(ROUTER_TTFT.name, RANGE, *ROUTER, LATER, HIT, by=by)
    return Query(
        f"({slow}) - on (deployment, prompt) group_left () ({fast})",
        "{{outcome}}, up to {{prompt}} tokens",
    )


def _within_objective() -> Query:
    name = ROUTER_TTFT.name
    near = increase(f"{name}_bucket", RANGE, *ROUTER, f'le="{OBJECTIVE}"')
    return Query(f"{near} / {increase(f'{name}_count', RANGE, *ROUTER)}", "{{deployment}}")


_SHARE = rate(ROUTER_TURNS.name, RATE_INTERVAL, *ROUTER, by="deployment, outcome")
_ALL = rate(ROUTER_TURNS.name, RATE_INTERVAL, *ROUTER)

BOARD = Board(
    "pd-turns",
    "pdctl / Turns and TTFT",
    "How long users wait for the first token, and what became of each turn's prompt.",
    (
        Row(
            "At a glance",
            (
                Panel(
                    "Turns per second",
                    "reqps",
                    "Follows the load. Zero under load means that no turn reaches an engine.",
                    "PdLegDown",
                    (Query(_ALL, "{{deployment}}"),),
                    "stat",
                    width=6,
                ),
                Panel(
                    "Turns read back",
                    "percentunit",
                    "Share of turns whose prompt came back from decode. With agents that hold "
                    "long conversations it is near (turns - conversations) / turns.",
                    "PdAlwaysMiss",
                    (
                        Query(
                            f"{increase(ROUTER_TURNS.name, RANGE, *ROUTER, HIT)} / "
                            f"{increase(ROUTER_TURNS.name, RANGE, *ROUTER)}",
                            "{{deployment}}",
                        ),
                    ),
                    "stat",
                    width=6,
                ),
                Panel(
                    "First token within the objective",
                    "percentunit",
                    "At or above the spec's ttft_target; ttft_slo is the time allowed.",
                    "PdTtftBurnsFast",
                    (_within_objective(),),
                    "stat",
                    width=6,
                ),
                Panel(
                    "Prompt tokens since the router's start",
                    "none",
                    "Read is close to offered: what a handle covers really comes back. Counted by "
                    "the engines.",
                    "PdReuseStopped",
                    (
                        Query(
                            total(ROUTER_TOKENS.name, *ROUTER, by="kind"),
                            "{{kind}}",
                        ),
                    ),
                    "stat",
                    width=6,
                ),
            ),
        ),
        Row(
            "Time to first token",
            (
                Panel(
                    "TTFT by turn number",
                    "s",
                    "Later turns are no slower than the first: with readback their time grows "
                    "with the new text, not with the history.",
                    "PdTtftBurnsFast",
                    _quantiles("turn", "turn {{turn}}"),
                ),
                Panel(
                    "TTFT by prompt length",
                    "s",
                    "Nearly flat over prompt length where most turns are read back.",
                    "PdTtftBurnsFast",
                    _quantiles("prompt", "up to {{prompt}} tokens"),
                ),
                Panel(
                    "TTFT, all turns",
                    "s",
                    "One band, or two: read back and computed. Grafana shows turns with a trace "
                    "as dots: open one of a slow bucket.",
                    "PdTtftBurnsSlowly",
                    (
                        Query(
                            increase(f"{ROUTER_TTFT.name}_bucket", RATE_INTERVAL, *ROUTER, by="le"),
                            "{{le}}",
                            exemplars=True,
                        ),
                    ),
                    "heatmap",
                ),
                Panel(
                    "Later turns, bidirectional on and off (p50)",
                    "s",
                    "On lies clearly below off. Needs a deployment of each, for example "
                    "rendered with --bidir off beside the first.",
                    "PdBidirectionalDisagree",
                    (_on_and_off(),),
                ),
            ),
        ),
        Row(
            "Reuse",
            (
                Panel(
                    "Outcome shares",
                    "percentunit",
                    "Mostly hit; miss is the share of first turns. history_changed means clients "
                    "edit their history, expired that they come back too late.",
                    "PdHandlesExpire",
                    (Query(f"{_SHARE} / on (deployment) group_left () {_ALL}", "{{outcome}}"),),
                    "stacked",
                    top=1.0,
                ),
                Panel(
                    "Turns by outcome since the router's start",
                    "none",
                    "Counts, not rates: they can be compared with a load's own record.",
                    "PdAlwaysMiss",
                    (Query(total(ROUTER_TURNS.name, *ROUTER, by="outcome"), "turns"),),
                    "bars",
                    by=("outcome",),
                ),
                Panel(
                    "What a later turn without readback costs",
                    "s",
                    "Extra seconds to the first token against turns of the same prompt length "
                    "that were read back, by outcome. Positive: that is what each costs its user. "
                    "Zero or below: readback does not pay at that length.",
                    "PdReuseStopped",
                    (_cost(),),
                    "table",
                    by=("deployment", "outcome", "prompt"),
                ),
                Panel(
                    "Why handles were not sent",
                    "reqps",
                    "Near zero. The reasons say what the client or the router changed.",
                    "history-changed",
                    (
                        Query(
                            rate(ROUTER_HANDLES_REFUSED.name, RATE_INTERVAL, *ROUTER, by="reason"),
                            "{{reason}}",
                        ),
                    ),
                ),
                Panel(
                    "Prompt tokens",
                    "short",
                    "Read (from decode) is far above computed once conversations are long.",
                    "PdReuseStopped",
                    (
                        Query(
                            rate(ROUTER_TOKENS.name, RATE_INTERVAL, *ROUTER, by="kind"),
                            "{{kind}} per second",
                        ),
                    ),
                ),
                Panel(
                    "Routes",
                    "reqps",
                    "The routes that the routing policy is meant to choose; the reason says why.",
                    "PdPairUnhealthy",
                    (
                        Query(
                            # Most of the possible ones are never taken.
                            rate(ROUTER_ROUTES.name, RATE_INTERVAL, *ROUTER, by="route, reason")
                            + " > 0",
                            "{{route}}: {{reason}}",
                        ),
                    ),
                    "stacked",
                ),
                Panel(
                    "Where prefill's prompt tokens came from",
                    "short",
                    "vLLM's own count: external_kv_transfer is what was read back. It stays at "
                    "zero when reuse has silently stopped.",
                    "PdReuseStopped",
                    (
                        Query(
                            rate(
                                contract.ENGINE_PROMPT_TOKENS_BY_SOURCE,
                                RATE_INTERVAL,
                                *ROUTER,
                                'role="prefill"',
                                by="source",
                            ),
                            "{{source}} per second",
                        ),
                    ),
                    "stacked",
                ),
            ),
        ),
    ),
)
