"""One turn's way through the router, top to bottom: :meth:`Turn.run`."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pd_connector import contract
from pd_connector.contract import Outcome
from pd_router import jsonbytes, sse
from pd_router.answer import Answer
from pd_router.body import FRESH_PREFILL, REQUEST_ID_HEADER, TurnBody, safe_request_id
from pd_router.engines import (
    Broken,
    EngineAnswer,
    Engines,
    LegFailure,
    NotReached,
    TimedOut,
    read_all,
)
from pd_router.errors import (
    EngineRefused,
    TurnError,
    bad_request,
    error_object,
    refusal,
    secrets_in,
    unavailable,
)
from pd_router.handles import Handle, HandleStore, key_of
from pd_router.health import Health
from pd_router.history import Continuation, Endpoint, Prompt, read_prompt
from pd_router.legs import Leg, Legs
from pd_router.metrics import Metrics
from pd_router.pipe import CLIENT_STALL_SECONDS, open_pipe
from pd_router.relay import OnComplete, StreamRelay, relay_body
from pd_router.reuse import outcome_of
from pd_router.settings import Settings

log = logging.getLogger("pd_router")

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

# Headers that an engine may see; any other could steer it (X-data-parallel-rank).
_FORWARDED_HEADERS = ("Authorization", REQUEST_ID_HEADER, "traceparent", "tracestate")

# Refusals that a handle could have caused; the others would only be repeated.
_PERHAPS_THE_HANDLE = (400, 422)


@dataclass(frozen=True, slots=True)
class Router:
    """What all turns share."""

    settings: Settings
    legs: Legs
    engines: Engines
    health: Health
    handles: HandleStore
    metrics: Metrics


@dataclass(slots=True)
class Prefilled:
    """What prefill made of the prompt."""

    params: dict[str, Any] | None
    """Prefill's ``kv_transfer_params`` for decode."""
    prompt_tokens: int | None


class Turn:
    """One request of a conversation and its answer."""

    def __init__(self, router: Router, endpoint: Endpoint, request: web.Request) -> None:
        self._router = router
        self._endpoint = endpoint
        self._request = request
        self._started = time.perf_counter()
        self._authorization = request.headers.get("Authorization", "")
        self._key: str | None = None
        self._prompt: Prompt | None = None
        self._headers: dict[str, str] = {}
        self._prefill_leg = "-"
        self._decode_leg = "-"
        self._outcome = Outcome.MISS
        self._tokens_read = 0
        self._prefill_ms: float | None = None
        self._ttft_ms: float | None = None
        self._ending = "aborted"

    async def run(self) -> web.StreamResponse:
        """The client's answer.

        Raises :class:`TurnError` or :class:`EngineRefused` while nothing has been sent.
        """
        try:
            body = TurnBody(self._endpoint, await self._request.read())
            self._router.metrics.stripped_params.inc(body.stripped)
            self._identify(body)
            self._require_legs()
            with ExitStack() as in_flight:
                if body.needs_decode_alone():
                    self._prompt = None
                    leg = self._place_decode(None, in_flight)
                    prefilled = Prefilled(None, None)
                else:
                    handle = self._claim()
                    leg = self._place_decode(handle, in_flight)
                    prefilled = await self._prefill(body, handle)
                self._count(prefilled)
                leg, answer = await self._decode(leg, body, prefilled, in_flight)
                try:
                    return await self._relay(leg, answer, prefilled)
                finally:
                    answer.close()
        except RecursionError:
            self._ending = "400"
            raise bad_request("The request body is nested too deeply.") from None
        except (TurnError, EngineRefused) as error:
            self._ending = str(error.status)
            raise
        finally:
            self._log()

    def _identify(self, body: TurnBody) -> None:
        conversation = body.conversation_id
        names = (*contract.CONVERSATION_HEADERS, *self._router.settings.conversation_headers)
        candidates = [conversation, *(self._request.headers.get(name) for name in names)]
        named = (str(c) for c in candidates if isinstance(c, str | int) and c != "")
        conversation = next(named, None)
        if not self._router.settings.bidirectional:
            self._outcome = Outcome.DISABLED
        elif conversation is not None:
            self._prompt = read_prompt(self._endpoint, body.fields)
        if conversation is not None:
            self._key = key_of(self._authorization, conversation)

    def _require_legs(self) -> None:
        self._router.legs.pick_prefill()
        self._router.legs.pick_decode()

    def _claim(self) -> Handle | None:
        """The conversation's handle, if this prompt is shown to continue its turn."""
        if self._key is None or not self._router.settings.bidirectional:
            return None
        claimed = self._router.handles.claim(self._key)
        if isinstance(claimed, Outcome):
            self._outcome = claimed
            return None
        if not self._continues(claimed):
            self._outcome = Outcome.HISTORY_CHANGED
            return None
        return claimed

    def _continues(self, handle: Handle) -> bool:
        if self._prompt is None:
            return False
        engine_proves = self._router.settings.connector == "pdctl"
        if engine_proves and not handle.token_proof:
            # From a decode leg without the connector: messages alone would have to be trusted.
            return False
        continuation = self._prompt.continuation(handle.past)
        if continuation is Continuation.BY_TOKENS:
            return engine_proves
        return continuation is Continuation.BY_MESSAGES

    def _place_decode(self, handle: Handle | None, in_flight: ExitStack) -> Leg:
        leg = self._router.legs.pick_decode(handle.leg if handle else None)
        in_flight.enter_context(leg.serving())
        self._decode_leg = leg.name
        return leg

    async def _prefill(self, body: TurnBody, handle: Handle | None) -> Prefilled:
        """Prefill the prompt, with the handle at most once and without it if that fails."""
        started = time.perf_counter()
        tried: set[Leg] = set()
        try:
            while True:
                leg = self._pick_prefill(tried, handle)
                try:
                    answer = await self._ask_prefill(leg, body, handle)
                except NotReached as failure:
                    self._router.health.mark_down(leg, failure.reason)
                    tried.add(leg)
                except _PrefillFailed as failure:
                    if handle is None:
                        self._fail_prefill(leg, failure, tried)
                        continue
                    log.info("prefill on %s failed with a handle: %s", leg.name, failure)
                    self._router.metrics.prefill_retries.inc()
                    self._outcome, _ = outcome_of(None, {}, self._seconds_left(handle))
                    handle = None
                else:
                    return self._read_prefill(answer, handle)
        finally:
            elapsed = time.perf_counter() - started
            self._prefill_ms = elapsed * 1000
            self._router.metrics.prefill_seconds.observe(elapsed)

    def _pick_prefill(self, tried: set[Leg], handle: Handle | None) -> Leg:
        try:
            leg = self._router.legs.pick_prefill(tried)
        except TurnError:
            if handle is not None and self._key is not None:
                self._router.handles.restore(self._key, handle)
            raise
        self._prefill_leg = leg.name
        return leg

    async def _ask_prefill(self, leg: Leg, body: TurnBody, handle: Handle | None) -> dict[str, Any]:
        """Raises :class:`NotReached`, :class:`_PrefillFailed` or :class:`EngineRefused`."""
        settings = self._router.settings
        params = handle.params if handle else FRESH_PREFILL
        bound = settings.readback_timeout if handle else settings.prefill_timeout
        try:
            with leg.serving():
                status, raw = await self._router.engines.fetch(
                    leg,
                    PATHS[self._endpoint],
                    body.for_prefill(params),
                    self._engine_headers(),
                    total=bound,
                )
        except (Broken, TimedOut) as failure:
            self._count_sent(handle)
            raise _PrefillFailed(failure.reason, failure) from failure
        self._count_sent(handle)
        if status >= 500 or (handle and status in _PERHAPS_THE_HANDLE):
            raise _PrefillFailed(f"HTTP {status}")
        if status != 200:
            raise refusal(status, raw, self._secrets(None))
        try:
            answer = jsonbytes.load(raw)
        except ValueError:
            raise _PrefillFailed("its answer is not JSON") from None
        if not isinstance(answer, dict):
            raise _PrefillFailed("its answer is not a JSON object")
        return answer

    def _count_sent(self, handle: Handle | None) -> None:
        if handle is not None:
            self._router.metrics.handles_sent.inc()

    def _fail_prefill(self, leg: Leg, failure: "_PrefillFailed", tried: set[Leg]) -> None:
        """A prefill without a handle failed: another leg if the connection broke, else give up."""
        if isinstance(failure.cause, Broken):
            tried.add(leg)
            return
        raise _leg_error(leg, failure.cause)

    def _read_prefill(self, answer: dict[str, Any], handle: Handle | None) -> Prefilled:
        params = answer.get(contract.KV_TRANSFER_PARAMS)
        if not isinstance(params, dict):
            log.warning("prefill on %s returned no blocks for decode", self._prefill_leg)
            params = None
        reuse = params.pop(contract.PD_REUSE, None) if params else None
        usage = answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        if handle is not None:
            left = self._seconds_left(handle)
            self._outcome, self._tokens_read = outcome_of(reuse, usage, left)
        tokens = usage.get("prompt_tokens")
        return Prefilled(params, tokens if isinstance(tokens, int) else None)

    def _seconds_left(self, handle: Handle) -> float:
        """How long decode still keeps a handle's blocks."""
        return self._router.settings.decode_ttl - self._router.handles.age(handle)

    def _count(self, prefilled: Prefilled) -> None:
        self._router.metrics.count_turn(self._outcome)
        self._headers = {
            contract.HEADER_REUSE: self._outcome.value,
            contract.HEADER_TOKENS_READ: str(self._tokens_read),
        }
        if prefilled.prompt_tokens is not None:
            self._headers[contract.HEADER_PROMPT_TOKENS] = str(prefilled.prompt_tokens)
        if self._prefill_ms is not None:
            self._headers[contract.HEADER_PREFILL_MS] = f"{self._prefill_ms:.0f}"

    async def _decode(
        self, leg: Leg, body: TurnBody, prefilled: Prefilled, in_flight: ExitStack
    ) -> tuple[Leg, EngineAnswer]:
        """Decode's open answer, status 200, and the leg that gives it."""
        payload = body.for_decode(prefilled.params)
        settings = self._router.settings
        streamed = bool(body.fields.get("stream"))
        while True:
            try:
                answer = await self._router.engines.post(
                    leg,
                    PATHS[self._endpoint],
                    payload,
                    self._engine_headers(),
                    total=None if streamed else settings.answer_timeout,
                    idle=settings.stream_idle_timeout if streamed else None,
                )
                if answer.status == 200:
                    return leg, answer
                try:
                    raw = await read_all(leg, answer)
                finally:
                    answer.close()
            except NotReached as failure:
                self._router.health.mark_down(leg, failure.reason)
                leg = self._place_decode(None, in_flight)
                continue
            except LegFailure as failure:
                raise _leg_error(failure.leg, failure) from failure
            if answer.status >= 500:
                raise _leg_error(leg, None)
            raise refusal(answer.status, raw, self._secrets(prefilled.params))

    async def _relay(
        self, leg: Leg, answer: EngineAnswer, prefilled: Prefilled
    ) -> web.StreamResponse:
        if answer.content_type == "text/event-stream":
            return await self._relay_stream(leg, answer, prefilled)
        return await self._relay_body(leg, answer)

    async def _relay_body(self, leg: Leg, answer: EngineAnswer) -> web.Response:
        try:
            raw = relay_body(await read_all(leg, answer), self._keeper(leg))
        except LegFailure as failure:
            raise _leg_error(failure.leg, failure) from failure
        except ValueError:
            raise _leg_error(leg, None) from None
        self._ttft_ms = (time.perf_counter() - self._started) * 1000
        self._ending = "200"
        return web.Response(body=raw, headers={**self._headers, "Content-Type": "application/json"})

    async def _relay_stream(
        self, leg: Leg, answer: EngineAnswer, prefilled: Prefilled
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**self._headers, "Cache-Control": "no-cache"})
        response.headers["Content-Type"] = answer.headers["content-type"]
        secrets = self._secrets(prefilled.params)
        relay = StreamRelay(self._router.settings.max_body_bytes, secrets, self._keeper(leg))
        try:
            pipe = await open_pipe(
                self._request,
                response,
                answer,
                relay,
                stall_seconds=CLIENT_STALL_SECONDS,
                on_first=self._note_first_event,
            )
            try:
                await pipe.run()
                self._ending = "200"
                if not relay.done:
                    raise Broken(leg, "the stream ended early")
            except (LegFailure, sse.EventTooLarge) as failure:
                pipe.write(self._broken_stream(leg, failure))
            await pipe.finish(response)
        except ConnectionResetError:
            self._ending = "client_gone"
        return response

    def _broken_stream(self, leg: Leg, failure: Exception) -> bytes:
        """The event that tells a client of a stream under way that it got no whole answer."""
        self._ending = "broken_stream"
        reason = "its answer is too large"
        if isinstance(failure, LegFailure):
            reason = failure.reason
        message = f"The answer is incomplete: {leg.name}: {reason}."
        return sse.event_of(jsonbytes.dump(error_object(502, message, "engine_error")))

    def _note_first_event(self) -> None:
        if self._ttft_ms is None:
            elapsed = time.perf_counter() - self._started
            self._ttft_ms = elapsed * 1000
            self._router.metrics.ttft_seconds.observe(elapsed)

    def _keeper(self, leg: Leg) -> OnComplete | None:
        """What keeps decode's handle for the next turn, if there can be one."""
        key, prompt = self._key, self._prompt
        if key is None or prompt is None:
            return None

        def keep(answer: Answer) -> None:
            try:
                store(answer)
            except Exception:
                # The client gets its answer whatever becomes of the handle.
                log.exception("a handle could not be kept")

        def store(answer: Answer) -> None:
            params = answer.handle
            if params is None or not _can_be_read(params) or leg.down is not None:
                return
            handle = Handle(
                params=jsonbytes.dump(params),
                leg=leg.name,
                past=prompt.finished(answer),
                token_proof=isinstance(params.get(contract.PD_TOKENS), dict),
                born=self._router.handles.now(),
            )
            self._router.handles.put(key, handle)
            self._router.metrics.handles_stored.inc()

        return keep

    def _secrets(self, params: dict[str, Any] | None) -> list[str]:
        return [*self._router.legs.addresses, *secrets_in(params)]

    def _engine_headers(self) -> dict[str, str]:
        sent = self._request.headers
        return {
            name: sent[name]
            for name in _FORWARDED_HEADERS
            if name in sent
            and sent[name].isascii()
            and (name != REQUEST_ID_HEADER or safe_request_id(sent[name]))
        }

    def _log(self) -> None:
        log.info(
            "turn router=%s conversation=%s prefill=%s decode=%s outcome=%s "
            "Prefill done in %sms cache %s ttft_ms=%s tokens_read=%d end=%s",
            self._router.settings.name,
            self._key[:12] if self._key else "-",
            self._prefill_leg,
            self._decode_leg,
            self._outcome.value,
            "-" if self._prefill_ms is None else f"{self._prefill_ms:.0f}",
            "HIT" if self._outcome is Outcome.HIT else "MISS",
            "-" if self._ttft_ms is None else f"{self._ttft_ms:.0f}",
            self._tokens_read,
            self._ending,
        )


class _PrefillFailed(Exception):
    """Prefill was reached and did not do its work."""

    def __init__(self, reason: str, cause: LegFailure | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


def _can_be_read(params: dict[str, Any]) -> bool:
    """Decode holds blocks and lets prefill read them."""
    blocks = params.get(contract.REMOTE_BLOCK_IDS)
    return params.get(contract.DO_REMOTE_DECODE) is True and bool(blocks)


def _leg_error(leg: Leg, failure: LegFailure | None) -> TurnError:
    """The client's error for a leg that was reached and did not answer well."""
    if isinstance(failure, TimedOut):
        return TurnError(504, f"{leg.name} did not answer in time.", "timeout")
    if isinstance(failure, Broken):
        return unavailable(f"{leg.name} is not reachable: {failure.reason}.")
    return TurnError(502, f"{leg.name} failed to answer.", "engine_error")
