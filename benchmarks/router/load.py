"""The load: a number of streams, each asking again when its answer has ended.

Prints one JSON object: times to first event, what arrived, and errors. With two URLs it
does a router's work itself, prefill first and then decode, which is what a router that
takes no time would do.

usage: python load.py --url ROUTER | --direct PREFILL DECODE  --streams N --seconds S
"""

import argparse
import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

import uvloop

HISTORY = 12
"""Messages of every request, some 200 characters each."""


class Stats:
    def __init__(self) -> None:
        self.ttfb: list[float] = []
        self.requests = 0
        self.events = 0
        self.errors: dict[str, int] = {}
        self.open = True
        self.from_time = 0.0

    def error(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1


def request(url: str, number: int, stream: bool, turn: int, chunks: int) -> bytes:
    """Of every two turns the second continues the first, with the answer it got."""
    text = f"conversation {number} " + "lorem ipsum dolor sit amet " * 7
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n in range(HISTORY)]
    messages.append({"role": "user", "content": "What now?"})
    if turn % 2:
        messages.append({"role": "assistant", "content": " token" * (chunks - 1) + " end"})
        messages.append({"role": "user", "content": "And then?"})
    body: dict[str, Any] = {"model": "fake", "messages": messages, "max_tokens": 100}
    if stream:
        body |= {"stream": True, "conversation_id": f"c{number}-{turn // 2}"}
    raw = json.dumps(body, separators=(",", ":")).encode()
    parts = urlsplit(url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        f"content-type: application/json\r\nauthorization: Bearer key\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


class Connection(asyncio.Protocol):
    """One client connection; knows no more of HTTP than it needs."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._transport: Any = None
        self._first: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] | None = None
        self._tail = b""
        self._stream = False
        self._head = False
        self._sent = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._end is not None and not self._end.done():
            self._end.set_exception(ConnectionError("closed"))

    async def ask(self, raw: bytes, stream: bool, started: float) -> None:
        """Send and wait for the end; the time to the first event is noted."""
        if self._transport is None:
            raise ConnectionError("closed")
        self._end = asyncio.get_running_loop().create_future()
        self._tail, self._stream, self._head = b"", stream, False
        self._sent = started
        self._transport.write(raw)
        await self._end

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        end = self._end
        if end is None or end.done():
            return
        if self._stream:
            found = data.count(b"data: ")
            if not self._head:
                self._tail += data
                if not self._tail.startswith(b"HTTP/1.1 200"):
                    end.set_exception(ConnectionError(self._tail[9:12].decode()))
                    return
                if b"data: " not in self._tail:
                    return
                self._head = True
                found = self._tail.count(b"data: ")
                if self._sent >= self._stats.from_time:
                    self._stats.ttfb.append(now - self._sent)
            self._stats.events += found
            self._tail = (self._tail + data)[-16:]
            if self._tail.endswith(b"\r\n0\r\n\r\n"):
                end.set_result(None)
            return
        self._tail += data
        head, mark, body = self._tail.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
        if mark and len(body) >= int(length or b"0"):
            end.set_result(None)


class Client:
    """One stream after another."""

    def __init__(self, stats: Stats, urls: list[str], number: int, chunks: int) -> None:
        self._stats = stats
        self._urls = urls
        self._number = number
        self._chunks = chunks
        self._connections: dict[str, Connection] = {}

    async def run(self, until: float, delay: float) -> None:
        await asyncio.sleep(delay)
        turn = -1
        while time.perf_counter() < until:
            turn += 1
            started = time.perf_counter()
            try:
                for url in self._urls:
                    stream = url == self._urls[-1]
                    raw = request(url, self._number, stream, turn, self._chunks)
                    await (await self._connection(url)).ask(raw, stream, started)
                if started >= self._stats.from_time:
                    self._stats.requests += 1
            except OSError as error:
                self._stats.error(str(error) or type(error).__name__)
                self._connections.clear()
                await asyncio.sleep(0.05)

    async def _connection(self, url: str) -> Connection:
        found = self._connections.get(url)
        if found is None or found._transport is None:
            parts = urlsplit(url)
            _, found = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._stats), parts.hostname, parts.port
            )
            self._connections[url] = found
        return found


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def load(given: argparse.Namespace) -> dict[str, Any]:
    stats = Stats()
    begin = time.perf_counter()
    stats.from_time = begin + given.warm
    until = stats.from_time + given.seconds
    urls = given.direct or [given.url]
    spread = given.warm * 0.8 / given.streams
    clients = [Client(stats, urls, n, given.chunks) for n in range(given.streams)]
    ends = [asyncio.create_task(c.run(until, n * spread)) for n, c in enumerate(clients)]
    await asyncio.sleep(given.warm)
    print("warm", flush=True)
    events = stats.events
    await asyncio.sleep(given.seconds)
    events = stats.events - events
    print("over", flush=True)
    await asyncio.gather(*ends)
    return {
        "ttfb_p50": quantile(stats.ttfb, 0.5) * 1000,
        "ttfb_p99": quantile(stats.ttfb, 0.99) * 1000,
        "samples": len(stats.ttfb),
        "events_per_s": events / given.seconds,
        "requests_per_s": len(stats.ttfb) / given.seconds,
        "events": events,
        "errors": stats.errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--url")
    target.add_argument("--direct", nargs=2, metavar=("PREFILL", "DECODE"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5, help="measured time after warm-up")
    parser.add_argument("--chunks", type=int, default=100, help="content chunks of an answer")
    parser.add_argument("--warm", type=float, default=2)
    print(json.dumps(uvloop.run(load(parser.parse_args()))))


if __name__ == "__main__":
    main()
