"""Requests that are no turns: to one leg and back, less whatever is between engines.

What an engine keeps for a request (a stored response) stays with its decode leg: the router
remembers where the latest ones are.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web

from pd_connector import contract
from pd_router import jsonbytes
from pd_router.body import strip
from pd_router.engines import EngineAnswer, LegFailure, NotReached
from pd_router.errors import (
    ErrorForm,
    TurnError,
    bad_request,
    error_event,
    refusal,
)
from pd_router.exchange import leg_error
from pd_router.forward import engine_headers
from pd_router.legs import Leg
from pd_router.parts import Router
from pd_router.pipe import open_pipe
from pd_router.relay import StreamRelay, body_without_handle
from pd_router.sse import EventTooLarge

log = logging.getLogger("pd_router")

MOST_REMEMBERED = 10_000
"""Stored responses whose leg is remembered."""

# Headers of an engine's answer that its client gets; pooling tells what its bytes are in one.
_ANSWER_HEADERS = {"content-type": "Content-Type", "metadata": "metadata"}


@dataclass(frozen=True, slots=True)
class Way:
    """How requests of one path are passed on."""

    path: str
    role: Literal["prefill", "decode"]
    form: ErrorForm = "openai"
    last: tuple[bytes, ...] = ()
    """Names of a stream's last event."""
    body: bool = True
    """Its requests have one."""


_STORED_PATH = "/v1/responses/{id:[A-Za-z0-9_-]+}"
_RESPONSES_END = (b"response.completed", b"response.failed", b"response.incomplete", b"error")
_MESSAGES_END = (b"message_stop", b"error")

GENERATE = (
    Way("/v1/responses", "decode", "responses", _RESPONSES_END),
    Way("/v1/messages", "decode", "anthropic", _MESSAGES_END),
)
STORED = (
    ("GET", Way(_STORED_PATH, "decode", "responses", _RESPONSES_END, body=False)),
    ("POST", Way(f"{_STORED_PATH}/cancel", "decode", "responses", body=False)),
)
_COMPUTE = """
    /tokenize /detokenize /v1/embeddings /v2/embed /pooling /classify /score /v1/score
    /rerank /v1/rerank /v2/rerank
"""
COMPUTE = (
    *(Way(path, "prefill") for path in _COMPUTE.split()),
    Way("/v1/messages/count_tokens", "prefill", "anthropic"),
)
"""Answered by a prefill leg, so that decode's streams are left alone."""


class PassThrough:
    """What all such requests share."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._stored: OrderedDict[str, str] = OrderedDict()

    async def answer(self, way: Way, request: web.Request, raw: bytes) -> web.StreamResponse:
        """The client's answer.

        Raises :class:`TurnError` or :class:`~pd_router.errors.EngineRefused` while nothing has
        been sent.
        """
        body, stripped = _body(raw) if way.body else (None, 0)
        if stripped:
            self._router.metrics.stripped.inc(stripped)
        leg, answer = await self._ask(way, request, body)
        try:
            with leg.serving():
                if answer.content_type == "text/event-stream":
                    return await self._stream(way, request, leg, answer)
                return await self._whole(way, leg, answer)
        finally:
            answer.close()

    async def _ask(
        self, way: Way, request: web.Request, body: dict[str, Any] | None
    ) -> tuple[Leg, EngineAnswer]:
        """A leg's open answer, status 200."""
        tried: set[Leg] = set()
        preferred = self._preferred(way, request, body)
        payload = None if body is None else jsonbytes.dump(body)
        headers = engine_headers(request.headers)
        if payload is not None:
            headers["Content-Type"] = "application/json"
        streamed = body is None or bool(body.get("stream"))
        while True:
            leg = self._pick(way, preferred, tried)
            try:
                answer = await self._router.engines.send(
                    leg,
                    request.method,
                    request.rel_url.raw_path_qs if payload is None else request.rel_url.raw_path,
                    headers,
                    payload,
                    total=None if streamed else self._router.settings.answer_timeout,
                    idle=self._router.settings.stream_idle_timeout if streamed else None,
                )
            except NotReached as failure:
                self._router.health.mark_down(leg, failure.reason)
                tried.add(leg)
                continue
            except LegFailure as failure:
                raise leg_error(failure) from failure
            if answer.status == 200:
                return leg, answer
            try:
                raw = await answer.read()
            except LegFailure as failure:
                raise leg_error(failure) from failure
            finally:
                answer.close()
            if answer.status >= 500:
                raise TurnError(502, f"{leg.name} failed to answer.", "engine_error")
            raise refusal(answer.status, raw, self._router.legs.addresses, way.form)

    def _preferred(self, way: Way, request: web.Request, body: dict[str, Any] | None) -> str | None:
        """The decode leg that has what the request continues, as far as that is known."""
        if way.role != "decode":
            return None
        stored = request.match_info.get("id") or (body or {}).get("previous_response_id")
        if isinstance(stored, str) and stored in self._stored:
            return self._stored[stored]
        names = (*contract.CONVERSATION_HEADERS, *self._router.settings.conversation_headers)
        named = next((request.headers[name] for name in names if name in request.headers), stored)
        up = sorted(leg.name for leg in self._router.legs.decode if leg.down is None)
        if not isinstance(named, str) or not up:
            return None
        # The same one for every router, and for as long as the legs stay the same.
        return max(up, key=lambda leg: hashlib.sha256(f"{leg} {named}".encode()).digest())

    def _pick(self, way: Way, preferred: str | None, tried: set[Leg]) -> Leg:
        if way.role == "decode":
            return self._router.legs.pick_decode(preferred)
        try:
            return self._router.legs.pick_prefill(tried)
        except TurnError:
            return self._router.legs.pick_decode()

    async def _whole(self, way: Way, leg: Leg, answer: EngineAnswer) -> web.Response:
        try:
            raw = await answer.read()
        except LegFailure as failure:
            raise leg_error(failure) from failure
        if answer.content_type == "application/json":
            try:
                body = jsonbytes.load(raw)
            except ValueError:
                raise TurnError(502, f"{leg.name} failed to answer.", "engine_error") from None
            raw = body_without_handle(raw, body)
            if way.form == "responses" and isinstance(body, dict):
                self._remember(body.get("id"), leg)
        return web.Response(body=raw, headers=_answer_headers(answer.headers))

    async def _stream(
        self, way: Way, request: web.Request, leg: Leg, answer: EngineAnswer
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_answer_headers(answer.headers))
        response.headers["Cache-Control"] = "no-cache"
        relay = StreamRelay(
            self._router.settings.max_body_bytes,
            self._router.legs.addresses,
            None,
            way.form,
            way.last,
        )
        if way.form == "responses":
            relay.on_first = lambda event: self._remember(_response_id(event), leg)
        try:
            pipe = await open_pipe(
                request,
                response,
                answer,
                relay,
                stall_seconds=self._router.settings.client_stall_timeout,
                on_first=_nothing,
                splices=self._router.splices,
            )
            try:
                await pipe.run()
                if not relay.done:
                    pipe.write(_incomplete(way, leg, "the stream ended early"))
            except LegFailure as failure:
                pipe.write(_incomplete(way, leg, failure.reason))
            except EventTooLarge:
                pipe.write(_incomplete(way, leg, "its answer is too large"))
            await pipe.finish(response)
        except ConnectionResetError:
            log.debug("the client has gone")
        return response

    def _remember(self, response_id: Any, leg: Leg) -> None:
        if not isinstance(response_id, str) or len(response_id) > 256:
            return
        self._stored[response_id] = leg.name
        while len(self._stored) > MOST_REMEMBERED:
            self._stored.popitem(last=False)


def _body(raw: bytes) -> tuple[dict[str, Any], int]:
    try:
        fields = jsonbytes.load(raw)
    except ValueError:
        raise bad_request("The request body is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise bad_request("The request body must be a JSON object.")
    fields.pop(contract.CONVERSATION_ID, None)
    return fields, strip(fields)


def _answer_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[key] for key, name in _ANSWER_HEADERS.items() if key in headers}


def _incomplete(way: Way, leg: Leg, reason: str) -> bytes:
    message = f"The answer is incomplete: {leg.name}: {reason}."
    return error_event(502, message, "engine_error", way.form)


def _response_id(event: bytes) -> Any:
    try:
        return jsonbytes.load(event.partition(b"data: ")[2].partition(b"\n")[0])["response"]["id"]
    except (ValueError, KeyError, TypeError):
        return None


def _nothing() -> None:
    return None
