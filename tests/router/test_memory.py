"""What an exchange with an engine leaves: nothing that only the cycle collector would free.

The collector runs rarely, since each of its runs is a pause for all streams; what broken streams
left for it would pile up.
"""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from pd_router.enginehttp import Connection
from pd_router.engines import Engines, LegFailure, failed
from pd_router.legs import Leg

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"9\r\ndata: x\n\n\r\n"


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def exchange(url: str, leave: bool) -> None:
    """One, until the engine breaks it off or, with ``leave``, until its first bytes."""
    leg, engines = Leg("decode-0", "decode", url), Engines()
    answer = await engines.post(leg, "/", b"{}", {}, idle=60)
    first = asyncio.Event()
    try:
        answer.connection.attach(lambda piece: first.set())
        await (first.wait() if leave else answer.connection.end)
    except (asyncio.TimeoutError, OSError) as error:
        raise failed(leg, error) from error
    finally:
        answer.close()


@pytest.mark.parametrize("ends", ["broken", "left", "whole", "no answer"])
async def test_an_exchange_is_gone_when_it_is_over(ends: str) -> None:
    answers = {"broken": HEAD + CHUNK, "left": HEAD + CHUNK, "no answer": b""}
    answers["whole"] = HEAD + CHUNK + b"0\r\n\r\n"
    over, gone = asyncio.Event(), asyncio.Event()
    known: list[weakref.ref[Connection]] = []
    made = Connection.connection_made

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(answers[ends])
        if ends == "left":
            await over.wait()
        writer.close()

    def note(self: Connection, transport: asyncio.Transport) -> None:
        known.append(weakref.ref(self, lambda ref: gone.set()))
        made(self, transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "connection_made", note)
        async with await asyncio.start_server(engine, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            try:
                await exchange(f"http://127.0.0.1:{port}", ends == "left")
            except LegFailure:
                assert ends in ("broken", "no answer")
            over.set()
            await asyncio.wait_for(gone.wait(), 10)
    assert len(known) == 1
