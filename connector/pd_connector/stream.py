"""Puts a handle into the last finish chunk of a streamed answer."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from pd_connector.contract import KV_TRANSFER_PARAMS

# Inside a JSON string every quote is escaped, so these bytes are a key with a string
# value; a chunk that does not finish a choice has null there.
_FINISH = '"finish_reason":"'


class HandleTap:
    """Passes an engine's outputs on and keeps the handle of the finished answer.

    ``pick`` gives the output that may carry the answer's handle, or None. The
    handle is that of the output with which the answer is finished: what the
    non-streaming answer would carry.
    """

    __slots__ = ("_pick", "_source", "handle")

    def __init__(self, source: AsyncIterator[Any], pick: Callable[[Any], Any]) -> None:
        self._source = source
        self._pick = pick
        self.handle: Any = None

    def __aiter__(self) -> "HandleTap":
        return self

    async def __anext__(self) -> Any:
        item = await self._source.__anext__()
        output = self._pick(item)
        if output is not None and output.finished:
            self.handle = output.kv_transfer_params
        return item


def finish_chunk(event: str) -> dict[str, Any] | None:
    """The chunk of a server-sent event if it finishes a choice, else None."""
    if _FINISH not in event or not event.startswith("data: {"):
        return None
    try:
        chunk = json.loads(event[len("data: ") :])
    except ValueError:
        return None
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    return chunk if choices[0].get("finish_reason") else None


def add_handle(event: str, handle: Any) -> str:
    """``event`` with the handle as one more field of its chunk, else unchanged."""
    field = json.dumps(handle, ensure_ascii=False, separators=(",", ":"))
    end = event.rindex("}")
    return f'{event[:end]},"{KV_TRANSFER_PARAMS}":{field}{event[end:]}'


async def with_handle(
    events: AsyncGenerator[str, None], tap: HandleTap, choices: int
) -> AsyncGenerator[str, None]:
    """``events`` with the tapped handle on the last of ``choices`` finish chunks."""
    unfinished = choices
    try:
        async for event in events:
            if unfinished and _FINISH in event and (chunk := finish_chunk(event)) is not None:
                unfinished -= 1
                wanted = not unfinished and tap.handle is not None
                yield (
                    add_handle(event, tap.handle)
                    if wanted and (KV_TRANSFER_PARAMS not in chunk)
                    else event
                )
            else:
                yield event
    finally:
        await events.aclose()
