"""Why a handle is not sent, why a turn takes its route, why a prefill is repeated.

Each is a value of a metric's label, so there are few of them.
"""

from typing import Literal, get_args

from pd_connector.contract import Route

Refusal = Literal[
    "history_changed",
    "not_bidirectional",
    "not_readable",
    "pair_down",
    "taken",
    "tokens_differ",
    "unproven",
]
"""A handle is there, and is not sent."""

NoHandle = Literal["expired", "no_handle", "not_comparable", "off", "one_leg"]

NotAppended = Literal[
    "append_no_history", "append_no_prefix_cache", "append_too_long", "append_would_stall"
]

RouteReason = Literal["cheapest", "no_prefill_leg", "pinned", "repeated"] | (
    NotAppended | NoHandle | Refusal
)

REFUSALS: tuple[str, ...] = get_args(Refusal)

ROUTE_REASONS: dict[Route, tuple[str, ...]] = {
    Route.RECOMPUTE: (
        "cheapest",
        "pinned",
        "no_prefill_leg",
        "repeated",
        "expired",
        "no_handle",
        "not_comparable",
        "off",
        *REFUSALS,
    ),
    Route.READBACK: ("cheapest", "pinned", *get_args(NotAppended)),
    Route.APPEND: ("cheapest", "pinned", "no_prefill_leg", "one_leg"),
}
"""The reasons that each route can have."""

PREFILL_FAULTS = ("timeout", "connection_broke", "not_json", "http_400", "http_500")
"""Why a prefill is repeated without its handle; another HTTP status is rare."""
