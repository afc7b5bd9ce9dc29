"""The HTTP surface: routes, error answers and the parts' lifetime."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from pd_router import jsonbytes
from pd_router.engines import LegFailure
from pd_router.errors import EngineRefused, TurnError, error_response, refusal, unavailable
from pd_router.history import Endpoint
from pd_router.legs import Leg
from pd_router.parts import Router, open_router
from pd_router.settings import Settings
from pd_router.turn import PATHS, Turn

log = logging.getLogger("pd_router")

_MODELS_SECONDS = 10.0
_ROUTER = web.AppKey("router", Router)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(settings: Settings) -> web.Application:
    """The router's application; its parts live from start-up to clean-up."""

    async def parts(app: web.Application) -> AsyncIterator[None]:
        async with open_router(settings) as router:
            app[_ROUTER] = router
            yield

    app = web.Application(
        client_max_size=settings.max_body_bytes, middlewares=[_count_requests, _errors_as_json]
    )
    app.cleanup_ctx.append(parts)
    for endpoint, path in PATHS.items():
        app.router.add_post(path, _turn_handler(endpoint))
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    return app


def _turn_handler(endpoint: Endpoint) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await Turn(request.app[_ROUTER], endpoint, request).run()

    return handle


@web.middleware
async def _count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    resource = request.match_info.route.resource
    path = "other" if resource is None else resource.canonical
    try:
        response = await handler(request)
    except asyncio.CancelledError:
        request.app[_ROUTER].metrics.requests.labels(path, "499").inc()
        raise
    request.app[_ROUTER].metrics.requests.labels(path, str(response.status)).inc()
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (TurnError, EngineRefused) as error:
        return error.response()
    except web.HTTPRequestEntityTooLarge:
        return error_response(413, "The request body is too large.", "invalid_request_error")
    except web.HTTPNotFound:
        return error_response(404, f"No such path: {request.path}", "not_found_error")
    except web.HTTPMethodNotAllowed as error:
        headers = {"Allow": ",".join(sorted(error.allowed_methods))}
        return error_response(405, "Method not allowed.", "invalid_request_error", headers)
    except web.HTTPException as error:
        return error_response(error.status, error.reason, "invalid_request_error")
    except ConnectionError:
        # The client has gone before its request was whole; nobody reads this.
        return error_response(400, "The request was cut off.", "invalid_request_error")
    except Exception:
        log.exception("unexpected error")
        return error_response(500, "The router failed.", "internal_error")


async def _metrics(request: web.Request) -> web.Response:
    accept = request.headers.get("Accept", "")
    text, content_type = request.app[_ROUTER].metrics.exposition(accept)
    return web.Response(body=text, headers={"Content-Type": content_type})


async def _health(request: web.Request) -> web.Response:
    """200 if a turn could be answered now, by asking every leg."""
    reasons = await request.app[_ROUTER].health.check_all()
    roles_up = {leg.role for leg, reason in reasons.items() if reason is None}
    healthy = roles_up == {"prefill", "decode"}
    legs = [
        {"name": leg.name, "role": leg.role, "healthy": reason is None, "reason": reason}
        for leg, reason in reasons.items()
    ]
    status = {"status": "ok" if healthy else "unavailable", "legs": legs}
    return web.json_response(status, status=200 if healthy else 503)


async def _models(request: web.Request) -> web.Response:
    """The models of all legs that answer, each id once."""
    router = request.app[_ROUTER]
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
