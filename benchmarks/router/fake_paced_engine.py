"""A fake engine that answers at a set pace and costs little: no model, no KV, no checks.

It says to prefill requests what a NIXL prefill leg says, and streams chat chunks as a decode
leg does, so that whatever stands before it can be timed. ``POST /fake/restart`` drops every
connection and starts a new life with a new engine id.

usage: python fake_paced_engine.py --port N [--prefill-ms 5] [--chunks 100] [--chunk-ms 10]
"""

import argparse
import asyncio
import itertools
import json
import os
import time
from collections import defaultdict
from typing import Any

import uvloop

TICK = 0.001
"""Seconds between two looks at what is due; the pace is as exact as this."""

_JSON_HEAD = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class Script:
    """The prepared bytes of every answer."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.prefill_ticks = round(given.prefill_ms / 1000 / TICK)
        self.chunk_ticks = round(given.chunk_ms / 1000 / TICK)
        self.engine_id = os.urandom(8).hex()
        self.port = given.port
        head = '{"id":"chatcmpl-8fb1e0c2d34f4b5a9c7e6d5f4a3b2c1d","object":"chat.completion.chunk",'
        head += '"created":1764460800,"model":"fake","choices":[{"index":0,"delta":'
        middle = '{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
        first = '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
        last = '{"content":" end"},"logprobs":null,"finish_reason":"stop","stop_reason":null,'
        last += '"token_ids":null}],"kv_transfer_params":%s}'
        self.first = _framed(head + first)
        self.middle = _framed(head + middle)
        self._last = head + last
        self.count = given.chunks
        self.answer = 'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}'
        self._numbers = itertools.count()

    def last(self) -> bytes:
        handle = json.dumps(self.handle(prefill=False), separators=(",", ":"))
        return _framed(self._last % handle) + _framed("[DONE]") + b"0\r\n\r\n"

    def handle(self, *, prefill: bool) -> dict[str, Any]:
        number = next(self._numbers)
        proof = {} if prefill else {"pd_tokens": {"v": 1, "n": 2000, "digest": "00" * 32}}
        return proof | {
            "do_remote_prefill": prefill,
            "do_remote_decode": not prefill,
            "remote_block_ids": [[number % 1000 + block for block in range(16)]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"chatcmpl-{self.engine_id}-{number}",
            "remote_host": "127.0.0.1",
            "remote_port": self.port + 10000,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 2000,
            "remote_blocks_expiry_time": None if prefill else time.perf_counter() + 480,
            "transfer_mode": "pull",
        }

    def prefill(self, reads: bool) -> bytes:
        params = self.handle(prefill=True)
        outcome = {"outcome": "hit", "tokens_read": 1900} if reads else {"outcome": "miss"}
        params["pd_reuse"] = outcome
        usage = {"prompt_tokens": 2000, "completion_tokens": 1, "total_tokens": 2001}
        message = {"role": "assistant", "content": "x"}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "fake"}
        return _json({**answer, "choices": [choice], "usage": usage, "kv_transfer_params": params})


def _framed(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _json(value: Any, status: int = 200) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    return _JSON_HEAD % (status, len(body)) + body


class Clock:
    """Calls things when they are due, many at one look."""

    def __init__(self) -> None:
        self._due: dict[int, list[Any]] = defaultdict(list)
        self._started = time.monotonic()
        self._done = 0

    def after(self, ticks: int, call: Any) -> None:
        self._due[self._now() + max(ticks, 1)].append(call)

    def _now(self) -> int:
        return int((time.monotonic() - self._started) / TICK)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = self._now()
            for tick in range(self._done + 1, now + 1):
                for call in self._due.pop(tick, ()):
                    call()
            self._done = now


OPEN: "set[Connection]" = set()


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, script: Script, clock: Clock) -> None:
        self._script = script
        self._clock = clock
        self._buffer = b""
        self._left = 0
        self._paused = False
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        OPEN.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        OPEN.discard(self)
        self._transport = None

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, mark, rest = head.partition(b"content-length:")
            total = end + 4 + (int(rest.split(b"\r\n", 1)[0]) if mark else 0)
            if len(self._buffer) < total:
                return
            body, self._buffer = self._buffer[end + 4 : total], self._buffer[total:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        script = self._script
        if head.startswith(b"post /fake/restart"):
            script.engine_id = os.urandom(8).hex()
            for connection in list(OPEN):
                connection._transport.abort()
        elif head.startswith(b"get /metrics"):
            self._transport.write(_JSON_HEAD % (200, 0))
        elif head.startswith(b"get "):
            models = {"object": "list", "data": [{"id": "fake", "object": "model"}]}
            self._transport.write(_json(models))
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._left = script.count
            self._transport.write(_STREAM_HEAD + script.first)
            self._clock.after(script.chunk_ticks, self._next)
        else:
            reads = b'"remote_block_ids":[[' in body
            self._clock.after(script.prefill_ticks, lambda: self._prefill(reads))

    def _prefill(self, reads: bool) -> None:
        if self._transport is not None:
            self._transport.write(self._script.prefill(reads))

    def _next(self) -> None:
        if self._transport is None:
            return
        if not self._paused:
            self._left -= 1
            if not self._left:
                self._transport.write(self._script.last())
                return
            self._transport.write(self._script.middle)
        self._clock.after(self._script.chunk_ticks, self._next)


async def serve(given: argparse.Namespace) -> None:
    script, clock = Script(given), Clock()
    loop = asyncio.get_running_loop()
    await loop.create_server(
        lambda: Connection(script, clock), "127.0.0.1", given.port, backlog=4096
    )
    await clock.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill-ms", type=float, default=5)
    parser.add_argument("--chunks", type=int, default=100, help="content chunks of an answer")
    parser.add_argument("--chunk-ms", type=float, default=10, help="pace of the chunks")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
