"""One turn's way through the router, top to bottom: :meth:`Turn.run`."""

import asyncio
import logging
import time
from typing import Any, NamedTuple

from aiohttp import web

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome, Route
from pd_router import claims, jsonbytes, reuse, sse
from pd_router.body import FRESH_APPEND, TurnBody
from pd_router.claims import Found
from pd_router.engines import Broken, EngineAnswer, LegFailure, NotReached
from pd_router.errors import (
    EngineRefused,
    TurnError,
    bad_request,
    error_object,
)
from pd_router.exchange import (
    PATHS,
    PrefillFailed,
    ask_decode,
    ask_prefill,
    leg_error,
    prefill_params,
)
from pd_router.handles import Handle
from pd_router.history import Endpoint, Prompt, ids_digest, read_prompt
from pd_router.identity import identify
from pd_router.keep import Keeper
from pd_router.legs import Leg, Serving
from pd_router.parts import Router
from pd_router.pipe import open_pipe
from pd_router.placement import Placement, place
from pd_router.relay import StreamRelay, relay_body
from pd_router.reuse import Reuse
from pd_router.routes import Choice
from pd_router.state import Params, TurnState
from pd_router.tokens import IdsTap, prompt_ids

__all__ = ["PATHS", "Turn"]

log = logging.getLogger("pd_router")

_OPERATIONS: dict[Endpoint, str] = {"chat": "chat", "completions": "text_completion"}
"""OpenTelemetry's names (gen_ai.operation.name)."""


class _Ahead(NamedTuple):
    """What a stream needs, made while decode has not answered yet."""

    leg: Leg
    params: Params
    keeper: Keeper
    relay: StreamRelay
    response: web.StreamResponse


class Turn(TurnState):
    """One request of a conversation and its answer."""

    def __init__(
        self, router: Router, endpoint: Endpoint, request: web.Request, raw: bytes
    ) -> None:
        """``raw`` is the request's body."""
        super().__init__(router, endpoint, request)
        self._raw = raw
        self._prompt: Prompt | None = None
        self._decode_began = 0.0
        self._decode_span: int | None = None
        self._decode_ms: float | None = None
        self._in_flight: list[Serving] = []
        """On decode legs."""
        self._ahead: _Ahead | None = None
        self._quiet = False
        """Nothing else ran where the prompt was computed, so that its time tells the speed."""

    async def run(self) -> web.StreamResponse:
        """The client's answer.

        Raises :class:`TurnError` or :class:`EngineRefused` while nothing has been sent.
        """
        try:
            body = TurnBody(self.endpoint, self._raw)
            if body.stripped:
                self.router.metrics.stripped.inc(body.stripped)
            self.router.budget.turn()
            self._identify(body)
            leg, placed = await self._choose(body)
            self._quiet = not leg.in_flight
            if placed.choice.route is Route.APPEND:
                self.router.chooser.appends(leg, placed.choice.new_tokens)
                self._in_flight.append(leg.serving(placed.choice.new_tokens))
                params = self._append_params()
            else:
                self._in_flight.append(leg.serving())
                params = await self._prefill(body, placed.choice, placed.prefill)
            leg, answer = await self._decode(leg, body, params)
            try:
                return await self._relay(leg, answer, body, params)
            finally:
                answer.close()
        except RecursionError:
            self.facts.ending = "refused"
            raise bad_request("The request body is nested too deeply.") from None
        except (TurnError, EngineRefused) as error:
            self.facts.ending = "refused" if error.status < 500 else "error"
            self.facts.error = f"HTTP {error.status}"
            raise
        except Exception as error:
            self.facts.ending, self.facts.error = "error", type(error).__name__
            raise
        finally:
            for serving in self._in_flight:
                serving.end()
            self.end()

    def _identify(self, body: TurnBody) -> None:
        """Whose turn of which conversation it is."""
        self._identity = identify(self.request.headers, body.conversation_id, self.settings)
        self.facts.conversation = self._identity.label
        if self.settings.trace_conversation_ids:
            self.facts.conversation_id = self._identity.conversation
        self.facts.operation = _OPERATIONS.get(self.endpoint)
        model = body.fields.get("model")
        self.facts.model = model if isinstance(model, str) else None
        if body.needs_decode_alone:
            return
        if self.settings.proof == "tokens":
            self.tap = IdsTap(body.wants_token_ids)
        self._prompt = read_prompt(self.endpoint, body.fields)
        if self._prompt is not None:
            self.facts.turn = self._prompt.turn

    async def _choose(self, body: TurnBody) -> tuple[Leg, Placement]:
        """The decode leg and the way there; where that wants a handle, it is claimed."""
        began, facts, router = time.perf_counter(), self.facts, self.router
        if body.needs_decode_alone:
            leg, found, near = router.legs.pick_decode(), Found(Outcome.MISS, "one_leg"), None
            placed = Placement(Choice(Route.APPEND, "one_leg", 1), None)
        else:
            found = await self._find()
            near = found.handle or found.near
            leg = router.legs.pick_decode(near.leg if near else None)
            placed = await self._place(found, leg, body)
        if self.claimed is not None:
            facts.handle_age = self.claimed.age()
            router.metrics.handle_age.observe(facts.handle_age)
        elif found.handle is not None and found.reason:
            router.metrics.handles_refused.labels(found.reason).inc()
        facts.outcome, facts.outcome_reason = found.outcome, found.reason
        facts.route, facts.route_reason = placed.choice.route, placed.choice.reason
        facts.decode_leg = leg.name
        attributes = {telemetry.HANDLE_AGE: None if near is None else near.age()}
        self.end_span(telemetry.SPAN_CLAIM, None, began, attributes)
        return leg, placed

    async def _find(self) -> Found:
        if self.settings.proof == "off" or self.settings.route == "recompute":
            return Found(Outcome.DISABLED, "off")
        if self._prompt is None:
            return Found(Outcome.MISS, "not_comparable")
        return await claims.find(self.router.handles, self._identity, self._prompt, self.settings)

    async def _place(self, found: Found, leg: Leg, body: TurnBody) -> Placement:
        router, prompt, pinned = self.router, self._prompt, self._pinned()
        placed = place(router, found, prompt, leg, pinned)
        reads = placed.choice.route is Route.READBACK
        if reads and self.settings.proof == "tokens" and prompt is not None:
            ids = router.prompt_ids
            await claims.prove(found, prompt, ids, leg, self.endpoint, body.fields)
            placed = place(router, found, prompt, leg, pinned)
        if placed.choice.route is Route.READBACK:
            self.claimed = await claims.claim(router.handles, found)
            if self.claimed is None:
                placed = place(router, found, prompt, leg, pinned)
        elif placed.choice.route is Route.APPEND and found.continues:
            # Nobody else may read what this turn goes on from; its own handle covers it.
            self.claimed = await claims.claim(router.handles, found)
        return placed

    def _pinned(self) -> Route | None:
        """The settings' route, or one that the client asks for and that costs nobody else."""
        if self.settings.route != "auto":
            return Route(self.settings.route)
        asked = self.request.headers.get(contract.HEADER_ROUTE, "").lower()
        return Route(asked) if asked in (Route.RECOMPUTE, Route.READBACK) else None

    def _append_params(self) -> Params:
        """What makes decode keep the blocks of a turn that it does alone."""
        if self.settings.connector != "pdctl" or self.settings.proof == "off":
            return None
        if self._prompt is None:
            return None
        params: dict[str, Any] = dict(FRESH_APPEND)
        if self.claimed is not None and self.claimed.request:
            params[contract.PD_PREVIOUS] = self.claimed.request
        return params

    async def _prefill(self, body: TurnBody, choice: Choice, first: Leg | None) -> Params:
        """Prefill the prompt, with the handle at most once and without it if that fails."""
        began, span, tried, error = time.perf_counter(), self.child_span(), set[Leg](), None
        legs, facts, leg = self.router.legs, self.facts, first
        try:
            while True:
                if leg is None or leg in tried or not leg.usable:
                    leg = legs.pick_prefill(tried)
                facts.prefill_leg, handle = leg.name, self.claimed
                self._quiet = not leg.in_flight
                sent_at = time.perf_counter()
                try:
                    with leg.serving(choice.new_tokens):
                        answer = await ask_prefill(self, leg, body, handle, span)
                except NotReached as failure:
                    self.router.health.mark_down(leg, failure.reason)
                    tried.add(leg)
                except PrefillFailed as failure:
                    if handle is not None:
                        log.info("prefill on %s failed with a handle: %s", leg.name, failure)
                        settle = self.doubt if failure.refused else self.readback_failed
                        settle(leg, handle, failure.label)
                    elif isinstance(failure.cause, Broken) and self.router.budget.take():
                        tried.add(leg)
                    else:
                        raise leg_error(failure.cause or LegFailure(leg, "failed")) from failure
                else:
                    self.settle_doubt(worked=True)
                    if handle is None or not self._read_other_tokens(answer, handle):
                        return self._prefilled(leg, answer, handle, sent_at)
                    log.warning("prefill on %s had other tokens than were proven", leg.name)
                    self.note(Reuse(Outcome.HISTORY_CHANGED, "tokens_differ"))
                    self.settle_claim(read=True)
        except (TurnError, EngineRefused) as refused:
            error = f"HTTP {refused.status}"
            raise
        finally:
            facts.prefill_ms = (time.perf_counter() - began) * 1000
            self.prefilled_at = time.monotonic()
            attributes = {
                telemetry.PREFILL_LEG: facts.prefill_leg,
                telemetry.OUTCOME: None if facts.outcome is None else facts.outcome.value,
            }
            self.end_span(telemetry.SPAN_PREFILL, span, began, attributes, error)

    def _read_other_tokens(self, answer: dict[str, Any], handle: Handle) -> bool:
        """Whether prefill, by its own word, computed another prompt than the router has proven."""
        ids = None if self.tap is None else prompt_ids(answer)
        return ids is not None and ids_digest(ids[: handle.tokens]) != handle.ids_digest

    def _prefilled(
        self, leg: Leg, answer: dict[str, Any], handle: Handle | None, began: float
    ) -> Params:
        """Take note of what prefill did."""
        params, facts = prefill_params(answer), self.facts
        if params is None:
            log.warning("prefill on %s returned no blocks for decode", leg.name)
        told, usage = reuse.pd_reuse(params), answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        if self.tap is not None:
            self.tap.prompt = prompt_ids(answer)
        if params is not None:
            self.router.health.saw_engine(leg, params.get(contract.REMOTE_ENGINE_ID))
        if handle is None:
            found = facts.outcome or Outcome.MISS
            self.note(reuse.recompute_of(found, facts.outcome_reason, usage))
        else:
            self.note_readback(
                leg, handle, reuse.readback_of(told, usage, self.seconds_left(handle))
            )
        if self._quiet:
            size = 0 if self._prompt is None else self._prompt.size
            self.router.chooser.costs.saw_prefill(facts, size, (time.perf_counter() - began) * 1000)
        return params

    async def _decode(self, leg: Leg, body: TurnBody, params: Params) -> tuple[Leg, EngineAnswer]:
        """Decode's open answer, status 200, and the leg that gives it."""
        repeated = False
        lost: Leg | None = None
        while True:
            alone = self.facts.route is Route.APPEND
            if not alone and self._too_late():
                params = await self._prefill_again(body)
            self._decode_began, self._decode_span = time.perf_counter(), self.child_span()
            # From here on decode may have gone on from the claimed handle's turn.
            self.sent = True
            if body.streams:
                # The request goes out first; this is done while decode has it.
                asyncio.get_running_loop().call_soon(self._make_ahead, leg, body, params)
            try:
                answer = await ask_decode(self, leg, body, params, self._decode_span, alone=alone)
            except NotReached as failure:
                self.router.health.mark_down(leg, failure.reason)
                self.sent, lost = False, None
            except LegFailure as failure:
                raise leg_error(failure) from failure
            else:
                if answer.status == 200:
                    return leg, answer
                if params is not None and not alone:
                    self.router.pairs.failed(self.facts.prefill_leg, leg.name)
                if repeated or not self.router.budget.take():
                    raise leg_error(LegFailure(leg, "failed"))
                repeated, lost = True, leg
            leg = self.router.legs.pick_decode(avoid=lost)
            self._in_flight.append(leg.serving())
            self.facts.decode_leg = leg.name
            # What prefill kept may be gone with the failure, and another leg has no history.
            if (alone or lost) and not body.needs_decode_alone:
                self.settle_claim()
                params = await self._prefill_again(body)

    def _too_late(self) -> bool:
        """Prefill may have freed its blocks: it keeps them until decode asks, but not for ever."""
        return time.monotonic() - self.prefilled_at > self.settings.handover_timeout

    async def _prefill_again(self, body: TurnBody) -> Params:
        self.facts.route, self.facts.route_reason = Route.RECOMPUTE, "repeated"
        tokens = self.facts.prompt_tokens or 0
        return await self._prefill(body, Choice(Route.RECOMPUTE, "repeated", tokens), None)

    async def _relay(
        self, leg: Leg, answer: EngineAnswer, body: TurnBody, params: Params
    ) -> web.StreamResponse:
        try:
            if answer.content_type == "text/event-stream":
                ahead = self._ahead
                if ahead is None or ahead.leg is not leg or ahead.params is not params:
                    ahead = self._make_ahead(leg, body, params)
                return await self._relay_stream(leg, answer, ahead)
            return await self._relay_body(leg, answer, self._keeper(leg))
        finally:
            attributes = {telemetry.DECODE_LEG: leg.name}
            self.end_span(telemetry.SPAN_DECODE, self._decode_span, self._decode_began, attributes)

    def _keeper(self, leg: Leg) -> Keeper:
        appended = self.facts.route is Route.APPEND
        return Keeper(
            router=self.router,
            settings=self.settings,
            identity=self._identity,
            prompt=self._prompt,
            leg=leg,
            tap=self.tap,
            turn=self.facts.turn,
            appended=appended and self._prompt is not None,
        )

    def _make_ahead(self, leg: Leg, body: TurnBody, params: Params) -> "_Ahead":
        appended = self.facts.route is Route.APPEND
        headers = {**self.facts.headers_now(outcome=not appended), "Cache-Control": "no-cache"}
        keeper = self._keeper(leg)
        relay = StreamRelay(
            self.settings.max_body_bytes,
            self.secrets(params),
            keeper.wanted,
            tap=self.tap,
            take_usage=appended,
            hide_usage=appended and not body.wants_usage,
        )
        self._ahead = _Ahead(leg, params, keeper, relay, web.StreamResponse(headers=headers))
        return self._ahead

    async def _relay_body(self, leg: Leg, answer: EngineAnswer, keeper: Keeper) -> web.Response:
        try:
            raw, usage = relay_body(await answer.read(), keeper.wanted, self.tap)
        except LegFailure as failure:
            raise leg_error(failure) from failure
        except ValueError:
            raise leg_error(LegFailure(leg, "not JSON")) from None
        if keeper.pending is not None:
            await keeper.pending
        self.facts.ttft_ms = self.ms()
        self._answered(usage)
        headers = {**self.facts.headers_now(), "Content-Type": "application/json"}
        return web.Response(body=raw, headers=headers)

    async def _relay_stream(
        self, leg: Leg, answer: EngineAnswer, ahead: "_Ahead"
    ) -> web.StreamResponse:
        if self.facts.route is Route.APPEND:
            self.facts.outcome = None  # Decode tells it at the end of the stream.
        keeper, relay, response = ahead.keeper, ahead.relay, ahead.response
        response.headers["Content-Type"] = answer.headers["content-type"]
        try:
            pipe = await open_pipe(
                self.request,
                response,
                answer,
                relay,
                stall_seconds=self.settings.client_stall_timeout,
                on_first=self._first_event,
                splices=self.router.splices,
            )
            try:
                await pipe.run()
                if not relay.done:
                    raise Broken(leg, "the stream ended early")
                self._answered(relay.usage)
            except (LegFailure, sse.EventTooLarge) as failure:
                pipe.write(self._broken_stream(leg, failure))
            if keeper.pending is not None:
                await keeper.pending
            await pipe.finish(response)
        except ConnectionResetError:
            self.facts.ending = "client_gone"
        return response

    def _first_event(self) -> None:
        self.facts.ttft_ms = self.ms()
        attributes = {telemetry.DECODE_LEG: self.facts.decode_leg}
        self.end_span(telemetry.SPAN_FIRST_TOKEN, None, self._decode_began, attributes)
        self._decode_ms = (time.perf_counter() - self._decode_began) * 1000

    def _answered(self, usage: dict[str, Any]) -> None:
        """The answer is whole."""
        facts = self.facts
        facts.ending = "ok"
        if facts.route is Route.APPEND:
            self.note(reuse.append_of(usage))
        if self._quiet and self._decode_ms is not None:
            self.router.chooser.costs.saw_first_token(facts, self._decode_ms)

    def _broken_stream(self, leg: Leg, failure: Exception) -> bytes:
        """The event that tells a client of a stream under way that it got no whole answer."""
        self.facts.ending = "broken_stream"
        reason = "its answer is too large"
        if isinstance(failure, LegFailure):
            reason = failure.reason
        message = f"The answer is incomplete: {leg.name}: {reason}."
        return sse.event_of(jsonbytes.dump(error_object(502, message, "engine_error")))
