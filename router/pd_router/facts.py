"""What is known of a turn, and where it is told: headers, metrics, one log line, its span."""

import logging
from dataclasses import dataclass
from typing import Any

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome, Route
from pd_connector.telemetry import Attribute
from pd_router.metrics import Metrics

log = logging.getLogger("pd_router")


@dataclass(slots=True)
class Facts:
    """One turn. Tokens are the engines' own counts where they gave any."""

    conversation: str = "-"
    conversation_id: str | None = None
    """In clear, where the settings allow it."""
    operation: str | None = None
    """OpenTelemetry's name of it."""
    model: str | None = None
    turn: int = 1
    outcome: Outcome | None = None
    """None: it has not been decided, or the answer that tells it has not ended."""
    outcome_reason: str = ""
    route: Route | None = None
    route_reason: str = ""
    prefill_leg: str = "-"
    decode_leg: str = "-"
    handle_age: float | None = None
    prompt_tokens: int | None = None
    offered: int = 0
    """Tokens of the handle that was sent."""
    read: int = 0
    computed: int | None = None
    read_ms: float | None = None
    read_bytes: int | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    ending: str = "client_gone"
    error: str | None = None

    def headers_now(self, *, outcome: bool = True) -> dict[str, str]:
        """The headers that tell the client about its turn: what is known by now, the outcome
        only if it is."""
        known = self.outcome if outcome else None
        told: dict[str, str | None] = {
            contract.HEADER_REUSE: None if known is None else known.value,
            contract.HEADER_TOKENS_READ: str(self.read),
            contract.HEADER_PROMPT_TOKENS: _text(self.prompt_tokens),
            contract.HEADER_PREFILL_MS: _text(self.prefill_ms),
            contract.HEADER_ROUTE: None if self.route is None else self.route.value,
            contract.HEADER_READ_MS: None if self.read_ms is None else f"{self.read_ms:.1f}",
            contract.HEADER_READ_BYTES: _text(self.read_bytes),
        }
        return {name: text for name, text in told.items() if text is not None}

    def count(self, metrics: Metrics, trace: str | None) -> None:
        """Count the turn, once it has ended; ``trace`` is the id of its trace."""
        metrics.endings.labels(self.ending).inc()
        if self.route is None:
            return
        metrics.routes.labels(self.route.value, self.route_reason).inc()
        if self.outcome is None:
            return
        outcome, route = self.outcome.value, self.route.value
        metrics.turns.labels(outcome, route).inc()
        prompt = telemetry.prompt_band(self.prompt_tokens or 0)
        counts = (
            ("prompt", self.prompt_tokens),
            ("offered", self.offered),
            ("read", self.read),
            ("computed", self.computed),
        )
        for kind, tokens in counts:
            if tokens:
                metrics.tokens.labels(kind).inc(tokens)
        exemplar = None if trace is None else {telemetry.EXEMPLAR_TRACE_ID: trace}
        if self.prefill_ms is not None:
            seconds = self.prefill_ms / 1000
            metrics.prefill.labels(self.prefill_leg, outcome, prompt).observe(seconds, exemplar)
        if self.read_ms is not None and self.outcome is Outcome.HIT:
            metrics.readback.labels(self.prefill_leg, prompt).observe(self.read_ms / 1000)
        if self.ttft_ms is not None:
            turn = telemetry.turn_band(self.turn)
            metrics.ttft.labels(outcome, route, turn, prompt).observe(self.ttft_ms / 1000, exemplar)

    def log(self, router: str) -> None:
        """One line, ``key=value``."""
        hit = self.outcome in (Outcome.HIT, Outcome.LOCAL_HIT)
        log.info(
            "turn router=%s conversation=%s turn=%d route=%s route_reason=%s prefill=%s decode=%s "
            "outcome=%s reason=%s Prefill done in %sms cache %s ttft_ms=%s prompt_tokens=%s "
            "tokens_read=%d tokens_computed=%s handle_age_s=%s end=%s",
            router,
            self.conversation,
            self.turn,
            "-" if self.route is None else self.route.value,
            self.route_reason or "-",
            self.prefill_leg,
            self.decode_leg,
            "-" if self.outcome is None else self.outcome.value,
            self.outcome_reason or "-",
            _text(self.prefill_ms) or "-",
            "HIT" if hit else "MISS",
            _text(self.ttft_ms) or "-",
            _text(self.prompt_tokens) or "-",
            self.read,
            _text(self.computed) or "-",
            "-" if self.handle_age is None else f"{self.handle_age:.1f}",
            self.ending,
        )

    def attributes(self) -> dict[Attribute, Any]:
        """Of the turn's span."""
        known = {
            telemetry.CONVERSATION: self.conversation_id or self.conversation,
            telemetry.TURN_NUMBER: self.turn,
            telemetry.OUTCOME: None if self.outcome is None else self.outcome.value,
            telemetry.OUTCOME_REASON: self.outcome_reason or None,
            telemetry.ROUTE: None if self.route is None else self.route.value,
            telemetry.ROUTE_REASON: self.route_reason or None,
            telemetry.PREFILL_LEG: self.prefill_leg if self.prefill_leg != "-" else None,
            telemetry.DECODE_LEG: self.decode_leg if self.decode_leg != "-" else None,
            telemetry.TOKENS_PROMPT: self.prompt_tokens,
            telemetry.TOKENS_OFFERED: self.offered,
            telemetry.TOKENS_READ: self.read,
            telemetry.TOKENS_COMPUTED: self.computed,
            telemetry.TTFT_MS: self.ttft_ms,
            telemetry.GEN_AI_OPERATION: self.operation,
            telemetry.GEN_AI_MODEL: self.model,
            telemetry.GEN_AI_INPUT_TOKENS: self.prompt_tokens,
            telemetry.GEN_AI_CONVERSATION: self.conversation_id,
        }
        return known


def _text(number: float | None) -> str | None:
    return None if number is None else f"{number:.0f}"
