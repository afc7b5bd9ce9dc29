"""What one turn carries along: its facts, its claimed handle, its spans."""

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from pd_connector import telemetry
from pd_connector.contract import Outcome
from pd_connector.telemetry import Attribute, Span
from pd_router.errors import secrets_in
from pd_router.facts import Facts
from pd_router.forward import engine_headers
from pd_router.handles import Handle
from pd_router.history import Endpoint
from pd_router.legs import Leg
from pd_router.parts import Router
from pd_router.reuse import Reuse, readback_of
from pd_router.tokens import IdsTap

Params = dict[str, Any] | None
"""``kv_transfer_params`` for decode."""


class TurnState:
    """The state of a turn under way. The settings are those that it began with."""

    def __init__(self, router: Router, endpoint: Endpoint, request: web.Request) -> None:
        self.router = router
        self.settings = router.settings
        self.endpoint = endpoint
        self.request = request
        self.began = time.time_ns()
        self.started = time.perf_counter()
        self.facts = Facts()
        self.trace = (
            None if router.spans is None else router.spans.trace(request.headers.get("traceparent"))
        )
        self._forwarded = engine_headers(request.headers)
        self.tap: IdsTap | None = None
        self.claimed: Handle | None = None
        self._doubted: tuple[Leg, Handle, str] | None = None
        """Prefill refused the request that it came with; whose fault that was, its repeat tells."""
        self.sent = False
        """An engine has seen the claimed handle."""
        self.prefilled_at = 0.0
        """When prefill answered, on the monotonic clock."""

    def ms(self) -> float:
        """Milliseconds since the request came."""
        return (time.perf_counter() - self.started) * 1000

    # The claimed handle.

    def handle_sent(self, leg: Leg, handle: Handle) -> None:
        self.sent = True
        self.facts.offered = handle.tokens
        self.router.metrics.handles_sent.labels(leg.name).inc()

    def doubt(self, leg: Leg, handle: Handle, why: str) -> None:
        """Go on without the handle; if that is refused too, it is as good as before."""
        self.claimed, self._doubted = None, (leg, handle, why)

    def settle_doubt(self, worked: bool) -> None:
        """Say whether the request works without the handle that was doubted, if one was."""
        doubted, self._doubted = self._doubted, None
        if doubted is None:
            return
        leg, handle, why = doubted
        self.claimed, self.sent = handle, worked
        if worked:
            self.readback_failed(leg, handle, why)

    def settle_claim(self, read: bool = False) -> None:
        """End the claim: back into the store if no engine has seen it, else it is used up, and
        blocks that nobody has read are given back to decode."""
        handle, self.claimed = self.claimed, None
        if handle is None:
            return
        if not self.sent:
            self.router.background(self.router.handles.restore(handle))
            return
        self.router.background(self.router.handles.commit(handle))
        if not read:
            self.router.releases.add(handle)

    def seconds_left(self, handle: Handle) -> float:
        """How long decode still keeps a handle's blocks."""
        margin = self.settings.decode_ttl - self.settings.handle_ttl
        return handle.expires + margin - time.time()

    # What the engines told.

    def note(self, told: Reuse) -> None:
        facts = self.facts
        facts.outcome, facts.outcome_reason = told.outcome, told.reason
        facts.prompt_tokens, facts.computed = told.prompt_tokens, told.computed
        facts.read, facts.read_ms, facts.read_bytes = told.read, told.read_ms, told.read_bytes

    def note_readback(self, leg: Leg, handle: Handle, told: Reuse) -> None:
        """What came of the claimed handle, which is used up with it."""
        self.note(told)
        if told.outcome is Outcome.HIT:
            self.router.pairs.worked(leg.name, handle.leg)
        elif told.outcome is Outcome.FAILED:
            self.router.pairs.failed(leg.name, handle.leg)
        self.settle_claim(read=told.outcome is Outcome.HIT)

    def readback_failed(self, leg: Leg, handle: Handle, why: str) -> None:
        told = readback_of(None, {}, self.seconds_left(handle))
        self.router.metrics.prefill_retries.labels(leg.name, why).inc()
        self.note_readback(leg, handle, told)
        self.facts.outcome_reason = why

    # What engines and clients may see.

    def secrets(self, params: Mapping[str, Any] | None) -> list[str]:
        """Words that no client may see."""
        return [*self.router.legs.addresses, *secrets_in(params)]

    def engine_headers(self, span: int | None) -> dict[str, str]:
        """For a request to an engine under a child span of the turn's."""
        headers = dict(self._forwarded)
        if self.trace is not None and span is not None:
            headers["traceparent"] = self.trace.traceparent(span)
        return headers

    # Spans.

    def child_span(self) -> int | None:
        return None if self.trace is None else self.trace.child()

    def end_span(
        self,
        span: Span,
        child: int | None,
        began: float,
        attributes: Mapping[Attribute, Any],
        error: str | None = None,
    ) -> None:
        """A child span that began at ``began`` (time.perf_counter) ends now."""
        if self.trace is not None:
            started = self.began + int((began - self.started) * 1e9)
            self.trace.end(span, child or self.trace.child(), started, attributes, error)

    def end(self) -> None:
        """The turn is over: settle what is open, and tell of it."""
        self.settle_doubt(worked=False)
        self.settle_claim()
        self.facts.count(self.router.metrics, None if self.trace is None else self.trace.hex_id)
        self.facts.log(self.settings.name)
        if self.trace is not None:
            attributes = self.facts.attributes()
            error = self.facts.error
            self.trace.end(telemetry.SPAN_TURN, None, self.began, attributes, error)
