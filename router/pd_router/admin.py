"""``/admin``: looking at conversations and legs, releasing, draining."""

import asyncio
from typing import Any

from aiohttp import web

from pd_connector import contract
from pd_router.errors import TurnError, bad_request
from pd_router.handles import Handle
from pd_router.legs import Leg
from pd_router.parts import Router
from pd_router.pipe import open_pipes

MOST_LISTED = 1000


def admin_routes(app: web.Application, key: "web.AppKey[Router]") -> None:
    """Add the admin paths. Who may ask them is checked before."""

    async def conversations(request: web.Request) -> web.Response:
        count, start = _number(request, "limit", 100), _number(request, "offset", 0)
        if not 1 <= count <= MOST_LISTED:
            raise bad_request(f"limit must be between 1 and {MOST_LISTED}.")
        handles = await request.app[key].handles.newest(start, count)
        held = sum(request.app[key].handles.held().values())
        return web.json_response(
            {"held": held, "conversations": [_conversation(handle) for handle in handles]}
        )

    async def conversation(request: web.Request) -> web.Response:
        handles = await _found(request.app[key], request.match_info["id"])
        return web.json_response({"conversations": [_conversation(handle) for handle in handles]})

    async def release(request: web.Request) -> web.Response:
        router = request.app[key]
        handles = await _found(router, request.match_info["id"])
        await router.handles.drop(handles, "released")
        return web.json_response({"released": len(handles)})

    async def legs(request: web.Request) -> web.Response:
        router = request.app[key]
        held = router.handles.held()
        return web.json_response({"legs": [_leg(leg, held.get(leg.name)) for leg in router.legs]})

    async def drain(request: web.Request) -> web.Response:
        router, name = request.app[key], request.match_info["name"]
        leg = router.legs.named(name)
        if leg is None:
            known = ", ".join(leg.name for leg in router.legs)
            raise TurnError(404, f"No leg {name}; there are: {known}.", "not_found_error")
        leg.draining = request.match_info["what"] == "drain"
        return web.json_response(_leg(leg, router.handles.held().get(leg.name)))

    async def process(request: web.Request) -> web.Response:
        router = request.app[key]
        return web.json_response(
            {
                "tasks": len(asyncio.all_tasks()),
                "streams": len(open_pipes()),
                "spliced": 0 if router.splices is None else router.splices.count,
                "handles": sum(router.handles.held().values()),
            }
        )

    base = contract.ADMIN_PATH
    app.router.add_get(f"{base}/process", process)
    app.router.add_get(f"{base}/conversations", conversations)
    app.router.add_get(f"{base}/conversations/{{id}}", conversation)
    app.router.add_delete(f"{base}/conversations/{{id}}", release)
    app.router.add_get(f"{base}/legs", legs)
    app.router.add_post(f"{base}/legs/{{name}}/{{what:drain|undrain}}", drain)


async def _found(router: Router, key: str) -> list[Handle]:
    """The branches of a conversation, by its key or the beginning that logs and spans show."""
    handles = await router.handles.find([key])
    if not handles:
        newest = await router.handles.newest(0, router.settings.max_handles)
        handles = [handle for handle in newest if len(key) >= 8 and handle.key.startswith(key)]
    if not handles:
        raise TurnError(404, f"No conversation {key[:64]} is held.", "not_found_error")
    return handles


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 9:
        raise bad_request(f"{name} must be a whole number.")
    return int(text)


def _conversation(handle: Handle) -> dict[str, Any]:
    return {
        "id": handle.key,
        "leg": handle.leg,
        "turn": handle.turn,
        "tokens": handle.tokens,
        "age_s": round(handle.age(), 1),
        "left_s": round(handle.expires - handle.born - handle.age(), 1),
        "usable": handle.live(),
        "blocks_kept": handle.readable,
    }


def _leg(leg: Leg, held: int | None) -> dict[str, Any]:
    return {
        "name": leg.name,
        "role": leg.role,
        "up": leg.down is None,
        "reason": leg.down,
        "draining": leg.draining,
        "requests_in_flight": leg.in_flight,
        "tokens_in_flight": leg.tokens,
        "handles": held,
    }
