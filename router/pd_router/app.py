"""The HTTP surface: routes, who may ask, limits, error answers and the parts' lifetime."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import HttpVersion10, web
from aiohttp.typedefs import Middleware

from pd_connector import contract
from pd_router import jsonbytes
from pd_router.access import Access
from pd_router.admin import admin_routes
from pd_router.drain import Drain
from pd_router.engines import LegFailure
from pd_router.errors import (
    EngineRefused,
    ErrorForm,
    TurnError,
    error_response,
    refusal,
    unavailable,
)
from pd_router.history import Endpoint
from pd_router.legs import Leg
from pd_router.parts import Router, open_router
from pd_router.passthrough import COMPUTE, GENERATE, STORED, PassThrough, Way
from pd_router.reading import expect_later, read_body
from pd_router.settings import Settings
from pd_router.turn import PATHS, Turn

log = logging.getLogger("pd_router")

_MODELS_SECONDS = 10.0
_CLIENT_GONE = 499
"""Counted where the client has gone before its answer."""
ROUTER = web.AppKey("router", Router)
ACCESS = web.AppKey("access", list[Access])
"""One, in a list: a reload replaces it."""
DRAIN = web.AppKey("drain", Drain)
_PASS = web.AppKey("pass", PassThrough)
_FREE_PATHS = frozenset({"/health", "/metrics"})
"""Answered however many requests are in flight."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(settings: Settings, access: Access) -> web.Application:
    """The router's application; its parts live from start-up to clean-up."""

    async def parts(app: web.Application) -> AsyncIterator[None]:
        async with open_router(settings) as router:
            app[ROUTER] = router
            app[_PASS] = PassThrough(router)
            yield

    app = web.Application(client_max_size=settings.max_body_bytes)
    app[ACCESS] = [access]
    app[DRAIN] = Drain()
    app.middlewares.append(_guard(app))
    app.cleanup_ctx.append(parts)
    add = partial(app.router.add_route, expect_handler=expect_later)
    for endpoint, path in PATHS.items():
        add("POST", path, _turn_handler(app, endpoint))
    for way in (*GENERATE, *COMPUTE):
        add("POST", way.path, _pass_handler(way))
    for method, way in STORED:
        add(method, way.path, _pass_handler(way))
    add("GET", "/v1/models", _models)
    add("GET", "/health", _health)
    add("GET", "/metrics", _metrics)
    admin_routes(app, ROUTER)
    return app


def _turn_handler(app: web.Application, endpoint: Endpoint) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        router = app[ROUTER]
        raw = await read_body(request, router.settings)
        return await Turn(router, endpoint, request, raw).run()

    return handle


def _pass_handler(way: Way) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        router = request.app[ROUTER]
        raw = await read_body(request, router.settings)
        try:
            return await request.app[_PASS].answer(way, request, raw)
        except RecursionError:
            raise TurnError(
                400, "The request body is nested too deeply.", "invalid_request_error"
            ) from None

    return handle


def _guard(app: web.Application) -> Middleware:
    """Access, limits, drain and the count of requests, around every handler."""
    drain, access = app[DRAIN], app[ACCESS]

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        router, path = app[ROUTER], request.path
        form: ErrorForm = "anthropic" if path.startswith("/v1/messages") else "openai"
        with drain:
            try:
                if request.version < HttpVersion10:
                    raise TurnError(505, "HTTP/1.1 is spoken here.", "invalid_request_error")
                access[0].check(request)
                if path.startswith(contract.ADMIN_PATH):
                    access[0].check_admin(request)
                elif path not in _FREE_PATHS:
                    drain.check(router.settings.max_requests)
                response = await handler(request)
            except asyncio.CancelledError:
                if not drain.over or request.transport is None:
                    _count(request, router, _CLIENT_GONE)
                    raise
                response = unavailable("The router shuts down.").response(form)
            except Exception as error:
                response = _error_answer(request, error, form)
            if drain.begun and not response.prepared:
                response.force_close()
            _count(request, router, response.status)
            return response

    return guarded


def _error_answer(request: web.Request, error: Exception, form: ErrorForm) -> web.Response:
    def answer(status: int, message: str, kind: str, **headers: str) -> web.Response:
        return error_response(status, message, kind, headers, form)

    if isinstance(error, TurnError | EngineRefused):
        return error.response(form)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return answer(413, "The request body is too large.", "invalid_request_error")
    if isinstance(error, web.HTTPNotFound):
        return answer(404, f"No such path: {request.path}", "not_found_error")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ",".join(sorted(error.allowed_methods))
        return answer(405, "Method not allowed.", "invalid_request_error", Allow=allowed)
    if isinstance(error, web.HTTPException):
        return answer(error.status, error.reason, "invalid_request_error")
    if isinstance(error, ConnectionError | web.RequestPayloadError):
        # The client has gone before its request was whole, or it was not HTTP to its end.
        return answer(400, "The request was cut off.", "invalid_request_error")
    log.error("unexpected error", exc_info=error)
    return answer(500, "The router failed.", "internal_error")


def _count(request: web.Request, router: Router, status: int) -> None:
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else "other"
    router.metrics.requests.labels(path, str(status)).inc()


async def _metrics(request: web.Request) -> web.Response:
    accept = request.headers.get("Accept", "")
    text, content_type = request.app[ROUTER].metrics.exposition(accept)
    return web.Response(body=text, headers={"Content-Type": content_type})


async def _health(request: web.Request) -> web.Response:
    """200 if a turn could be answered now, by asking every leg."""
    reasons = await request.app[ROUTER].health.check_all()
    roles_up = {leg.role for leg, reason in reasons.items() if reason is None}
    healthy = roles_up == {"prefill", "decode"} and not request.app[DRAIN].begun
    legs = [
        {"name": leg.name, "role": leg.role, "healthy": reason is None, "reason": reason}
        for leg, reason in reasons.items()
    ]
    status = {"status": "ok" if healthy else "unavailable", "legs": legs}
    return web.json_response(status, status=200 if healthy else 503)


async def _models(request: web.Request) -> web.Response:
    """The models of all legs that answer, each id once."""
    router = request.app[ROUTER]
    headers = {
        name: request.headers[name] for name in ("Authorization",) if name in request.headers
    }

    async def ask(leg: Leg) -> tuple[int, bytes] | str:
        try:
            return await router.engines.get(leg, "/v1/models", headers, total=_MODELS_SECONDS)
        except LegFailure as failure:
            return failure.reason

    legs = [leg for leg in router.legs if leg.down is None]
    answers = await asyncio.gather(*map(ask, legs))
    models: dict[str, Any] = {}
    for answer in answers:
        if isinstance(answer, tuple) and answer[0] == 200:
            for model in _model_list(answer[1]):
                models.setdefault(model["id"], model)
    if models:
        return web.json_response({"object": "list", "data": list(models.values())})
    for answer in answers:
        if isinstance(answer, tuple) and 400 <= answer[0] < 500:
            raise refusal(answer[0], answer[1], router.legs.addresses)
    raise unavailable("No leg answered /v1/models.")


def _model_list(raw: bytes) -> list[dict[str, Any]]:
    try:
        data = jsonbytes.load(raw)["data"]
        return [model for model in data if isinstance(model["id"], str)]
    except (ValueError, KeyError, TypeError):
        return []
