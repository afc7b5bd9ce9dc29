"""A turn's requests to its engines, one each."""

from typing import Any

from pd_connector import contract
from pd_router import jsonbytes
from pd_router.body import FRESH_PREFILL, TurnBody
from pd_router.engines import Broken, EngineAnswer, LegFailure, NotReached, TimedOut
from pd_router.errors import TurnError, refusal, unavailable
from pd_router.handles import Handle
from pd_router.history import Endpoint
from pd_router.legs import Leg
from pd_router.state import Params, TurnState

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

# Refusals that a handle could have caused; the others would only be repeated.
_PERHAPS_THE_HANDLE = (400, 422)


class PrefillFailed(Exception):
    """Prefill was reached and did not do its work; ``label`` is one of a few.

    ``refused``: it did not begin, for the handle or for something else about the request.
    """

    def __init__(
        self, label: str, cause: LegFailure | None = None, *, refused: bool = False
    ) -> None:
        super().__init__(label)
        self.label = label
        self.cause = cause
        self.refused = refused


async def ask_prefill(
    turn: TurnState, leg: Leg, body: TurnBody, handle: Handle | None, span: int | None
) -> dict[str, Any]:
    """Prefill's answer.

    Raises :class:`~pd_router.engines.NotReached`, :class:`PrefillFailed` or
    :class:`~pd_router.errors.EngineRefused`.
    """
    settings = turn.settings
    params = handle.params if handle else FRESH_PREFILL
    payload = body.for_prefill(params, token_ids=turn.tap is not None)
    bound = settings.readback_timeout if handle else settings.prefill_timeout
    headers = turn.engine_headers(span)
    fetch = turn.router.engines.fetch
    # From here on prefill may have it, also if the turn is cut off.
    turn.sent = handle is not None
    try:
        status, raw = await fetch(leg, PATHS[turn.endpoint], payload, headers, total=bound)
    except NotReached:
        turn.sent = False
        raise
    except (Broken, TimedOut) as failure:
        if handle is not None:
            turn.handle_sent(leg, handle)
        label = "timeout" if isinstance(failure, TimedOut) else "connection_broke"
        raise PrefillFailed(label, failure) from failure
    if handle is not None:
        turn.handle_sent(leg, handle)
    if status >= 500:
        raise PrefillFailed(f"http_{status}")
    if handle and status in _PERHAPS_THE_HANDLE:
        raise PrefillFailed(f"http_{status}", refused=True)
    if status != 200:
        raise refusal(status, raw, turn.secrets(None))
    try:
        answer = jsonbytes.load(raw)
    except ValueError:
        raise PrefillFailed("not_json") from None
    if not isinstance(answer, dict):
        raise PrefillFailed("not_json")
    return answer


async def ask_decode(
    turn: TurnState, leg: Leg, body: TurnBody, params: Params, span: int | None, *, alone: bool
) -> EngineAnswer:
    """Decode's answer: open with status 200, or read and closed with a status of 5xx.

    ``alone``: nothing else tells what became of the prompt, so decode is asked for its counts.

    Raises :class:`~pd_router.engines.LegFailure` or :class:`~pd_router.errors.EngineRefused`.
    """
    streamed = body.streams
    answer = await turn.router.engines.post(
        leg,
        PATHS[turn.endpoint],
        body.for_decode(params, token_ids=turn.tap is not None, usage=alone),
        turn.engine_headers(span),
        total=None if streamed else turn.settings.answer_timeout,
        idle=turn.settings.stream_idle_timeout if streamed else None,
    )
    if answer.status == 200:
        return answer
    try:
        raw = await answer.read()
    finally:
        answer.close()
    if answer.status < 500:
        raise refusal(answer.status, raw, turn.secrets(params))
    return answer


def prefill_params(answer: dict[str, Any]) -> Params:
    """Prefill's ``kv_transfer_params`` for decode."""
    params = answer.get(contract.KV_TRANSFER_PARAMS)
    return params if isinstance(params, dict) else None


def leg_error(failure: LegFailure) -> TurnError:
    """The client's error for a leg that was reached and did not answer well."""
    name = failure.leg.name
    if isinstance(failure, TimedOut):
        return TurnError(504, f"{name} did not answer in time.", "timeout")
    if isinstance(failure, Broken):
        return unavailable(f"{name} is not reachable: {failure.reason}.")
    return TurnError(502, f"{name} failed to answer.", "engine_error")
