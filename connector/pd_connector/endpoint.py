"""The lease endpoint of an engine's API server: lists, frees and renews finished turns.

The server holds no leases: it passes orders on to the side channels of its engine's data-parallel
ranks, where decode's scheduler answers beside its loop.
"""

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Callable, Mapping
from typing import Any

from pd_connector.contract import ENGINE_LEASES_PATH, LEASE_KEY_HEADER, SECRET_FILE_VARIABLE
from pd_connector.control import ask, order_key, signed

ANSWER_SECONDS = 5.0
MOST_TURNS = 10_000
"""Turns of one request."""
LARGEST_PIECE = 1_000_000
"""Bytes of an order that one message carries, at most; the side channel takes four
times as much."""
LONGEST_ID = 1024


class RefusedError(Exception):
    """The request is answered with ``status`` and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def authorise(key: str | None, shown: str | None, client: str | None, has_secret: bool) -> None:
    """Raise RefusedError for whoever may not see or end leases.

    With a secret only its key opens; without one only clients on the engine's own machine may.
    """
    if key is None:
        raise RefusedError(503, "this engine has no key for its leases")
    if has_secret:
        if not hmac.compare_digest((shown or "").encode(), key.encode()):
            raise RefusedError(401, f"{LEASE_KEY_HEADER} is missing or wrong")
    elif not _is_loopback(client):
        raise RefusedError(
            403, f"without {SECRET_FILE_VARIABLE} leases are for this machine's loopback only"
        )


def checked_order(body: object) -> dict[str, Any]:
    """The order in a POST body. Raises RefusedError when it is not one."""
    if not isinstance(body, dict):
        raise RefusedError(400, "the body must be a JSON object")
    if unknown := set(body) - {"release", "renew"}:
        raise RefusedError(400, f"unknown key {sorted(map(str, unknown))[0]!r:.80}")
    release, renew = body.get("release") or [], body.get("renew") or {}
    if not isinstance(release, list) or not all(isinstance(turn, str) for turn in release):
        raise RefusedError(400, "release must be a list of ids")
    if not isinstance(renew, dict) or not all(_is_seconds(value) for value in renew.values()):
        raise RefusedError(400, "renew must be an object of ids and seconds above 0")
    if any(len(turn) > LONGEST_ID for turn in (*release, *renew)):
        raise RefusedError(400, f"an id has at most {LONGEST_ID} characters")
    if len(release) + len(renew) > MOST_TURNS:
        raise RefusedError(413, f"at most {MOST_TURNS} ids in one request")
    return {"release": release, "renew": renew}


def pieces(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The order in messages that a side channel takes, at least one."""
    parts: list[dict[str, Any]] = [{"release": [], "renew": {}}]
    size = 0
    for turn, seconds in (
        *((turn, None) for turn in order["release"]),
        *order["renew"].items(),
    ):
        size += 6 * len(turn) + 40
        if size > LARGEST_PIECE:
            parts.append({"release": [], "renew": {}})
            size = 0
        if seconds is None:
            parts[-1]["release"].append(turn)
        else:
            parts[-1]["renew"][turn] = seconds
    return parts


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer of the answers of all ranks (``rank`` tells them apart).

    Raises RefusedError when a rank refused.
    """
    if refusals := [answer["error"] for answer in answers if "error" in answer]:
        raise RefusedError(503, f"the engine refused: {refusals[0]}")
    ranks = {answer["rank"]: answer for answer in answers}.values()
    released = [turn for answer in answers for turn in answer["released"]]
    reading = [turn for answer in answers for turn in answer["reading"]]
    renewed = {t: left for answer in answers for t, left in answer["renewed"].items()}
    known = {*released, *reading, *renewed}
    named = {turn: None for answer in answers for turn in answer["unknown"]}
    return {
        "pins": sum(answer["pins"] for answer in ranks),
        "pinned_blocks": sum(answer["pinned_blocks"] for answer in ranks),
        "blocks": sum(answer["blocks"] or 0 for answer in ranks) or None,
        "high_water": answers[0]["high_water"] if answers else None,
        "turns": [turn for answer in answers for turn in answer["turns"]],
        "released": released,
        "reading": reading,
        "renewed": renewed,
        "unknown": [turn for turn in named if turn not in known],
    }


def add_lease_routes(app: Any, vllm_config: Callable[[], Any]) -> None:
    """GET and POST of the leases on an API server (FastAPI)."""
    from fastapi import Request  # noqa: PLC0415
    from fastapi.responses import JSONResponse  # noqa: PLC0415

    async def answer(request: Any, read: bool) -> Any:
        try:
            key = order_key()
            authorise(
                key,
                request.headers.get(LEASE_KEY_HEADER),
                request.client.host if request.client else None,
                bool(os.environ.get(SECRET_FILE_VARIABLE)),
            )
            orders = [{"list": True}] if read else pieces(checked_order(await _json(request)))
            answers = [
                answer
                for order in orders
                for answer in await _tell(side_channels(vllm_config()), order, key or "")
            ]
            body = together(answers)
        except RefusedError as refused:
            return JSONResponse({"error": str(refused)}, refused.status)
        except OSError as error:
            return JSONResponse({"error": f"the engine does not answer: {error}"}, 503)
        hidden = ("released", "reading", "renewed", "unknown") if read else ("turns",)
        return JSONResponse({name: value for name, value in body.items() if name not in hidden})

    async def listed(request: Request) -> Any:
        return await answer(request, True)

    async def ordered(request: Request) -> Any:
        return await answer(request, False)

    app.add_api_route(ENGINE_LEASES_PATH, listed, methods=["GET"], include_in_schema=False)
    app.add_api_route(ENGINE_LEASES_PATH, ordered, methods=["POST"], include_in_schema=False)


def side_channels(vllm_config: Any) -> list[tuple[str, int]]:
    """Host and port of the side channel of every data-parallel rank.

    Source: ``nixl/base_scheduler.py`` adds the rank's index to the configured port.
    """
    from vllm import envs  # noqa: PLC0415

    parallel = vllm_config.parallel_config
    ranks = max(1, int(getattr(parallel, "data_parallel_size", 1)))
    host, port = envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT
    return [(host, port + rank) for rank in range(ranks)]


async def _tell(
    ranks: list[tuple[str, int]], order: Mapping[str, Any], key: str
) -> list[dict[str, Any]]:
    message = signed(order, key)
    answers = await asyncio.gather(
        *(asyncio.to_thread(ask, host, port, message, ANSWER_SECONDS) for host, port in ranks)
    )
    return [{**answer, "rank": rank} for rank, answer in enumerate(answers)]


async def _json(request: Any) -> object:
    try:
        return await request.json()
    except ValueError:
        return None


def _is_loopback(client: str | None) -> bool:
    try:
        return client is not None and ipaddress.ip_address(client).is_loopback
    except ValueError:
        return False


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
