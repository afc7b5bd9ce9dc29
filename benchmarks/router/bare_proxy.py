"""The least that a P/D proxy in Python does: the router's server, client and native part, and
nothing of a turn's own work.

Prefill, then decode with what prefill returned; no identity, no history guard, no claim, no
route, no metrics, no log, no care for anything that goes wrong. What is faster than this is not
the turn's doing, and what is slower is.

usage: python bare_proxy.py --port N --prefill URL --decode URL
"""

import argparse
import asyncio
import gc
from typing import Any

import uvloop
from aiohttp import web

from pd_connector.contract import KV_TRANSFER_PARAMS
from pd_router import jsonbytes
from pd_router.enginehttp import Connection, Origin
from pd_router.sockets import plain_socket
from pd_router.splicing import Splices

_PATH = "/v1/chat/completions"
_FRESH = {"do_remote_decode": True, "do_remote_prefill": False}
_MARKS = (KV_TRANSFER_PARAMS.encode(), b"[DONE]")


class Stream:
    """One answer on its way."""

    def __init__(self, engine: Connection, transport: Any, splices: Splices) -> None:
        self._engine = engine
        self._transport = transport
        self._splices = splices
        self._first = True

    def take(self, piece: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if self._first:
            self._first = False
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        source, target = self._engine.boundary(), plain_socket(self._transport)
        if source is not None and target is not None and not self._engine.whole:
            splice = self._splices.begin(source, target, _MARKS, False, self._on_report)
            self._engine.lend(splice.silence)

    def _on_report(self, report: Any) -> None:
        _, reason, unsent, rest, _ = report
        if reason:
            self._transport.write(unsent)
            self._engine.take_back(rest)


async def serve(given: argparse.Namespace) -> None:
    prefill, decode, splices = Origin(given.prefill), Origin(given.decode), Splices()

    async def ask(origin: Origin, body: dict[str, Any]) -> Connection:
        request = origin.request("POST", _PATH, {}, jsonbytes.dump(body))
        connection = origin.idle_connection() or await origin.connect(5)
        await connection.ask(request)
        return connection

    async def turn(request: web.Request) -> web.StreamResponse:
        body = jsonbytes.load(await request.read())
        first = {**body, "stream": False, "max_tokens": 1, KV_TRANSFER_PARAMS: _FRESH}
        connection = await ask(prefill, first)
        body[KV_TRANSFER_PARAMS] = jsonbytes.load(await connection.read())[KV_TRANSFER_PARAMS]
        connection.close()
        connection = await ask(decode, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        writer: Any = await response.prepare(request)
        writer.send_headers()
        connection.attach(Stream(connection, writer.transport, splices).take)
        await connection.end
        await response.write_eof()
        connection.close()
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post(_PATH, turn)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", given.port, backlog=1024).start()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
