"""Every metric, span and attribute of pdctl, each named and described once.

Imports nothing of vLLM, the router or the toolkit. Router and connector create their
instruments from these records; dashboards, alert rules, the doctor and docs/telemetry.md
take their names from here.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pd_connector.contract import Outcome, Route

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric. ``name`` is as it stands in PromQL, a counter's ``_total`` included;
    a histogram's has no ``_bucket``, ``_sum`` or ``_count``."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    """All values of each label, where they are few and known before: such a counter is at 0 from
    the start, like one without labels."""

    def label_sets(self) -> Iterator[tuple[str, ...]]:
        """The labels of every series that is known before its first event."""
        if len(self.values) == len(self.labels):
            yield from itertools.product(*self.values)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A span attribute; ``type`` is str, int, float or bool."""

    name: str
    type: str
    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """A span and the span it is a child of (None: the client's, if it sent a traceparent)."""

    name: str
    parent: str | None
    text: str
    attributes: tuple[Attribute, ...] = ()


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
AGE_SECONDS = (1, 5, 15, 30, 60, 120, 240, 360, 480, 900, 1800)
TRANSFER_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
TRANSFER_BYTES = tuple(float(2**power) for power in range(16, 37, 2))
DESCRIPTORS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

EXEMPLAR_TRACE_ID = "trace_id"
"""Label of an exemplar that holds its trace's id; the router puts one on TTFT and prefill."""

PROMPT_BANDS = (2048, 4096, 8192, 16384, 24576, 32768)
"""Upper bounds, in tokens, of the values of a label ``prompt``; the last value is ``inf``."""
TURN_BANDS = ("1", "2", "3-4", "5-8", "9+")
"""Values of a label ``turn``: the turn's number in its conversation, counted from 1."""


def prompt_band(tokens: int) -> str:
    """The ``prompt`` label of a prompt of this many tokens."""
    return next((str(bound) for bound in PROMPT_BANDS if tokens <= bound), "inf")


def turn_band(number: int) -> str:
    """The ``turn`` label of a conversation's ``number``-th turn (from 1)."""
    if number <= 2:
        return str(max(number, 1))
    return "3-4" if number <= 4 else "5-8" if number <= 8 else "9+"


# The router's metrics.
ROUTER_TURNS = Metric(
    "pd_router_turns_total",
    "counter",
    "Turns whose prompt has its KV, by reuse outcome and route.",
    ("outcome", "route"),
    values=(tuple(outcome.value for outcome in Outcome), tuple(route.value for route in Route)),
)
ROUTER_ROUTES = Metric(
    "pd_router_routes_total",
    "counter",
    "Routes chosen, and why.",
    ("route", "reason"),
)
ROUTER_TOKENS = Metric(
    "pd_router_prompt_tokens_total",
    "counter",
    "Prompt tokens: all (prompt), covered by the handle that was sent (offered), read back from "
    "decode (read), computed by prefill (computed), as the engines counted them.",
    ("kind",),
    values=(("prompt", "offered", "read", "computed"),),
)
ROUTER_TTFT = Metric(
    "pd_router_time_to_first_token_seconds",
    "histogram",
    "Seconds from a streamed request to its first event.",
    ("outcome", "route", "turn", "prompt"),
    SECONDS,
)
ROUTER_PREFILL = Metric(
    "pd_router_prefill_seconds",
    "histogram",
    "Seconds from the prefill request to its answer, retries included.",
    ("leg", "outcome", "prompt"),
    SECONDS,
)
ROUTER_READBACK = Metric(
    "pd_router_readback_seconds",
    "histogram",
    "Seconds of the D->P read within a prefill, as prefill told them.",
    ("leg", "prompt"),
    TRANSFER_SECONDS,
)
ROUTER_HANDLES_STORED = Metric(
    "pd_router_handles_stored_total", "counter", "Handles kept for a next turn."
)
ROUTER_HANDLES_SENT = Metric(
    "pd_router_handles_sent_total", "counter", "Handles sent to a prefill leg.", ("leg",)
)
ROUTER_HANDLES_REFUSED = Metric(
    "pd_router_handles_refused_total",
    "counter",
    "Turns that had a handle which was not sent, by reason.",
    ("reason",),
)
ROUTER_HANDLES_DROPPED = Metric(
    "pd_router_handles_dropped_total",
    "counter",
    "Handles forgotten unused: expired, evicted, replaced, released, leg_restarted, leg_down.",
    ("reason",),
    values=(("expired", "evicted", "replaced", "released", "leg_restarted", "leg_down"),),
)
ROUTER_HANDLES_HELD = Metric(
    "pd_router_handles_held", "gauge", "Handles that could be used now.", ("leg",)
)
ROUTER_HANDLES_BYTES = Metric(
    "pd_router_handles_bytes", "gauge", "Bytes of memory the held handles are counted with."
)
ROUTER_HANDLES_BYTES_LIMIT = Metric(
    "pd_router_handles_bytes_limit", "gauge", "Most bytes that held handles may take."
)
ROUTER_HANDLES_LIMIT = Metric(
    "pd_router_handles_limit", "gauge", "Most handles that are held at once."
)
ROUTER_HANDLE_AGE = Metric(
    "pd_router_handle_age_seconds",
    "histogram",
    "Age of a handle, in seconds, when a turn claims it.",
    (),
    AGE_SECONDS,
)
ROUTER_HANDLE_TTL = Metric(
    "pd_router_handle_ttl_seconds", "gauge", "How long a handle is kept, in seconds."
)
ROUTER_PREFILL_RETRIES = Metric(
    "pd_router_prefill_retries_total",
    "counter",
    "Prefills repeated without their handle.",
    ("leg", "reason"),
)
ROUTER_STRIPPED = Metric(
    "pd_router_client_kv_params_stripped_total",
    "counter",
    "Transfer parameters stripped from client requests.",
)
ROUTER_REQUESTS = Metric(
    "pd_router_requests_total", "counter", "Requests by path and status.", ("path", "status")
)
ROUTER_ENDINGS = Metric(
    "pd_router_turn_endings_total",
    "counter",
    "How turns ended: ok, client_gone, broken_stream, refused, error.",
    ("ending",),
    values=(("ok", "client_gone", "broken_stream", "refused", "error"),),
)
ROUTER_LEG_UP = Metric(
    "pd_router_leg_up", "gauge", "1 while the leg answers, else 0.", ("leg", "role")
)
ROUTER_LEG_RESTARTS = Metric(
    "pd_router_leg_restarts_total", "counter", "Restarts of a leg that were noticed.", ("leg",)
)
ROUTER_PAIR_UP = Metric(
    "pd_router_pair_up",
    "gauge",
    "1 while transfers between the two legs work, else 0.",
    ("prefill_leg", "decode_leg"),
)
ROUTER_LEG_REQUESTS = Metric(
    "pd_router_leg_requests_in_flight", "gauge", "Requests in flight on a leg.", ("leg", "role")
)
ROUTER_LEG_TOKENS = Metric(
    "pd_router_leg_tokens_in_flight",
    "gauge",
    "Prompt tokens in flight on a leg, as estimated when they were sent.",
    ("leg", "role"),
)
ROUTER_SPANS_DROPPED = Metric(
    "pd_router_spans_dropped_total", "counter", "Spans that could not be exported."
)
ROUTER_INFO = Metric(
    "pd_router_info",
    "gauge",
    "1; the labels are the router's settings.",
    ("version", "connector", "bidirectional", "reuse_proof", "route"),
)

# What the connector adds to an engine's /metrics.
ENGINE_DECISIONS = Metric(
    "pd_engine_decisions_total",
    "counter",
    "Prompts on the prefill leg, by what was decided and came of it.",
    ("outcome",),
    values=(tuple(outcome.value for outcome in Outcome),),
)
ENGINE_TOKENS = Metric(
    "pd_engine_prompt_tokens_total",
    "counter",
    "Tokens of those prompts: held by the handle (asked), read (read), computed (computed), found "
    "in the leg's own prefix cache (local).",
    ("kind",),
    values=(("asked", "read", "computed", "local"),),
)
ENGINE_DECLINED = Metric(
    "pd_engine_declined_expired_reads_total",
    "counter",
    "Readbacks declined because decode's blocks had expired or were about to.",
)
ENGINE_REFUSED = Metric(
    "pd_engine_handles_refused_total",
    "counter",
    "Handles refused: unsigned, forged, foreign (another deployment's), altered, used, malformed, "
    "another_prompt (prefill computed another prompt than decode was asked).",
    ("reason",),
    values=(("unsigned", "forged", "foreign", "altered", "used", "malformed", "another_prompt"),),
)
ENGINE_REJECTED = Metric(
    "pd_engine_params_rejected_total",
    "counter",
    "Requests answered with HTTP 400 for their kv_transfer_params.",
    ("reason",),
    values=(("not_an_object", "unknown_key", "wrong_type", "out_of_range", "missing", "both"),),
)
ENGINE_TRANSFER_SECONDS = Metric(
    "pd_engine_transfer_seconds",
    "histogram",
    "Seconds of a NIXL READ, from posting to completion. direction: d2p or p2d.",
    ("direction", "backend", "peer"),
    TRANSFER_SECONDS,
)
ENGINE_TRANSFER_POST = Metric(
    "pd_engine_transfer_post_seconds",
    "histogram",
    "Seconds it took to post a NIXL READ.",
    ("direction", "backend", "peer"),
    TRANSFER_SECONDS,
)
ENGINE_TRANSFER_BYTES = Metric(
    "pd_engine_transfer_bytes",
    "histogram",
    "Bytes of a NIXL READ.",
    ("direction", "backend", "peer"),
    TRANSFER_BYTES,
)
ENGINE_TRANSFER_DESCRIPTORS = Metric(
    "pd_engine_transfer_descriptors",
    "histogram",
    "Descriptors of a NIXL READ.",
    ("direction", "backend", "peer"),
    DESCRIPTORS,
)
ENGINE_TRANSFER_FAILURES = Metric(
    "pd_engine_transfer_failures_total",
    "counter",
    "NIXL READs that failed.",
    ("direction", "backend", "peer"),
)
ENGINE_PINS = Metric("pd_engine_pinned_turns", "gauge", "Finished turns whose blocks decode keeps.")
ENGINE_PINNED_BLOCKS = Metric(
    "pd_engine_pinned_blocks", "gauge", "KV blocks that decode keeps for finished turns."
)
ENGINE_BLOCKS = Metric("pd_engine_kv_blocks", "gauge", "KV blocks that the engine has.")
ENGINE_PINS_ENDED = Metric(
    "pd_engine_pins_ended_total",
    "counter",
    "Finished turns whose blocks decode freed: read, released, successor, high_water, expired.",
    ("reason",),
    values=(("read", "released", "successor", "high_water", "expired"),),
)
ENGINE_SPANS_DROPPED = Metric(
    "pd_engine_spans_dropped_total", "counter", "Spans that could not be exported."
)
ENGINE_INFO = Metric(
    "pd_engine_info",
    "gauge",
    "1; the labels are the effective settings of the leg.",
    (
        "role",
        "bidirectional",
        "threshold",
        "decode_ttl",
        "policy",
        "backend",
        "provider",
        "connector",
        "version",
    ),
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)

# Span attributes.
CONVERSATION = Attribute(
    "pd.conversation", "str", "Hash of tenant and conversation id; never the id in clear."
)
TURN_NUMBER = Attribute("pd.turn_number", "int", "The turn's number in its conversation, from 1.")
OUTCOME = Attribute("pd.outcome", "str", "Reuse outcome of the prompt.")
OUTCOME_REASON = Attribute("pd.outcome_reason", "str", "Why it is that outcome.")
ROUTE = Attribute("pd.route", "str", "recompute, readback or append.")
ROUTE_REASON = Attribute("pd.route_reason", "str", "Why that route.")
PREFILL_LEG = Attribute("pd.prefill_leg", "str", "Name of the prefill leg.")
DECODE_LEG = Attribute("pd.decode_leg", "str", "Name of the decode leg.")
HANDLE_AGE = Attribute(
    "pd.handle_age_s", "float", "Age of the conversation's handle, in seconds, claimed or not."
)
TOKENS_PROMPT = Attribute("pd.tokens.prompt", "int", "Tokens of the prompt.")
TOKENS_OFFERED = Attribute("pd.tokens.offered", "int", "Tokens that the handle covers.")
TOKENS_READ = Attribute("pd.tokens.read", "int", "Tokens read back from decode.")
TOKENS_COMPUTED = Attribute("pd.tokens.computed", "int", "Tokens that prefill computed.")
TOKENS_LOCAL = Attribute("pd.tokens.local", "int", "Tokens in the leg's own prefix cache.")
TTFT_MS = Attribute("pd.ttft_ms", "float", "Milliseconds from the request to its first event.")
DIRECTION = Attribute("pd.direction", "str", "d2p (readback) or p2d.")
BYTES = Attribute("pd.bytes", "int", "Bytes transferred.")
DESCRIPTOR_COUNT = Attribute("pd.descriptors", "int", "Descriptors of the transfer.")
POST_MS = Attribute("pd.post_ms", "float", "Milliseconds it took to post the transfer.")
BACKEND = Attribute("pd.backend", "str", "NIXL backend.")
PEER = Attribute("pd.peer", "str", "Engine id of the peer without its per-start part.")

# Attributes of the resources of engine legs.
RESOURCE_LEG = Attribute("pd.leg", "str", "Name of the leg.")
RESOURCE_DEPLOYMENT = Attribute("pd.deployment", "str", "Name of the deployment.")

# OpenTelemetry's own names, from its semantic conventions for generative AI.
GEN_AI_OPERATION = Attribute("gen_ai.operation.name", "str", "chat or text_completion.")
GEN_AI_MODEL = Attribute("gen_ai.request.model", "str", "The model that the client asked for.")
GEN_AI_INPUT_TOKENS = Attribute("gen_ai.usage.input_tokens", "int", "Tokens of the prompt.")
GEN_AI_CONVERSATION = Attribute(
    "gen_ai.conversation.id",
    "str",
    "The conversation id in clear; only with observability.conversation_ids.",
)

EVENT_DECLINED = "Declining expired remote read"
"""Span event of a decision whose outcome is ``expired``; vLLM's own words for it."""

# Spans.
SPAN_TURN = Span(
    "pd.turn",
    None,
    "One request of a conversation and its answer, in the router.",
    (
        CONVERSATION,
        TURN_NUMBER,
        OUTCOME,
        OUTCOME_REASON,
        ROUTE,
        ROUTE_REASON,
        PREFILL_LEG,
        DECODE_LEG,
        TOKENS_PROMPT,
        TOKENS_OFFERED,
        TOKENS_READ,
        TOKENS_COMPUTED,
        TTFT_MS,
        GEN_AI_OPERATION,
        GEN_AI_MODEL,
        GEN_AI_INPUT_TOKENS,
        GEN_AI_CONVERSATION,
    ),
)
SPAN_CLAIM = Span("pd.claim", "pd.turn", "Finding and proving the handle.", (HANDLE_AGE,))
SPAN_PREFILL = Span(
    "pd.prefill", "pd.turn", "The prefill request, in the router.", (PREFILL_LEG, OUTCOME)
)
SPAN_FIRST_TOKEN = Span(
    "pd.decode.first_token",
    "pd.turn",
    "From the decode request to its first event.",
    (DECODE_LEG,),
)
SPAN_DECODE = Span("pd.decode", "pd.turn", "The decode request, in the router.", (DECODE_LEG,))
SPAN_DECISION = Span(
    "pd.decision",
    "pd.prefill",
    "A prompt on the prefill leg, from its arrival to its decided and accounted readback.",
    (OUTCOME, OUTCOME_REASON, TOKENS_OFFERED, TOKENS_READ, TOKENS_COMPUTED, TOKENS_LOCAL),
)
SPAN_TRANSFER = Span(
    "pd.transfer",
    "pd.prefill or pd.decode",
    "A NIXL READ: d2p under pd.prefill, p2d under pd.decode.",
    (DIRECTION, BYTES, DESCRIPTOR_COUNT, POST_MS, BACKEND, PEER),
)

SPANS: tuple[Span, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Span)
)
