"""The native part by itself: random streams through it, against a model of it."""

import array
import asyncio
import contextlib
import fcntl
import itertools
import math
import os
import re
import select
import socket
import termios
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_rig import wait_for

from pd_router.splicing import Splices

_splice = pytest.importorskip("pd_router._splice", reason="the native part was not built")

MARKS = (b"mark", b"\r", b"[DONE]")
REPORT_BYTES = 100
ENDED = {_splice.MARKED, _splice.ENGINE_ENDED}
BEFORE_THE_END = {_splice.BLOCKED, _splice.UNHEARD}


def chunk(payload: bytes, size: str = "%x") -> bytes:
    return (size % len(payload)).encode() + b"\r\n" + payload + b"\r\n"


def plain_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """What may be passed on of ``data``: chunks and their payloads, up to the first other one."""
    at = 0
    while head := re.compile(rb"([0-9a-fA-F]{1,5})\r\n").match(data, at):
        size = int(head[1], 16)
        end = head.end() + size + 2
        payload = data[head.end() : end - 2]
        if not 0 < size <= 65_520 or data[end - 2 : end] != b"\r\n":
            return
        if not payload.endswith(b"\n\n") or any(mark in payload for mark in MARKS):
            return
        yield data[at:end], payload
        at = end


def unread(connection: socket.socket) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, count)
    return count[0]


class Stream:
    """One stream through a splicer: the engine's end, the client's, and what was told of it."""

    def __init__(self, splicer: Any, keep: bool = True, reads: bool = True) -> None:
        self.splicer, self.keep, self.reads = splicer, keep, reads
        self.engine, self.source = socket.socketpair()
        self.target, self.client = socket.socketpair()
        self.engine.setblocking(False)
        self.client.setblocking(False)
        if not reads:
            self.target.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.sent = self.got = self.seen = self.unsent = self.rest = b""
        self.reason: int | None = None
        """Why it is over; None: it is not."""
        self.id = splicer.add(self.source.fileno(), self.target.fileno(), MARKS, keep)

    def send(self, data: bytes, streams: dict[int, "Stream"]) -> None:
        """Send and wait until it was read, or the stream is over."""
        while data and self.reason is None:
            try:
                count = self.engine.send(data)
            except BlockingIOError:
                count = 0
            self.sent, data = self.sent + data[:count], data[count:]
            take(self.splicer, streams)
            self.receive()
        wait_for(lambda: self.over(streams) or not unread(self.source), "it was read", pause=0)

    def over(self, streams: dict[int, "Stream"]) -> bool:
        take(self.splicer, streams)
        self.receive()
        return self.reason is not None

    def receive(self, last: bool = False) -> None:
        while self.reads or last:
            try:
                self.got += self.client.recv(1 << 20)
            except BlockingIOError:
                return

    def note(self, report: tuple[int, int, bytes, bytes, bytes], stopped: bool = False) -> None:
        _, reason, unsent, rest, seen = report
        self.seen += seen
        if reason or stopped:
            assert self.reason is None
            self.reason, self.unsent, self.rest = reason, unsent, rest
        else:
            assert unsent == rest == b""

    def stop(self) -> None:
        report = self.splicer.stop(self.id)
        assert (report is None) == (self.reason is not None)
        if report is not None:
            self.note(report, stopped=True)
        assert self.splicer.stop(self.id) is None

    def finish(self, streams: dict[int, "Stream"]) -> None:
        self.engine.shutdown(socket.SHUT_WR)
        wait_for(lambda: self.over(streams), "it is over", pause=0)

    def check(self) -> None:
        """No byte is lost, comes twice or in another order, and what was told is true."""
        self.receive(last=True)
        left = b"" if self.reason == _splice.ENGINE_ENDED else self._left()
        passed = self.got + self.unsent
        assert passed + self.rest + left == self.sent
        chunks = list(plain_chunks(passed))
        assert b"".join(raw for raw, _ in chunks) == passed
        assert self.seen == b"".join(payload for _, payload in chunks) * self.keep
        if self.reason in ENDED:
            assert passed == b"".join(raw for raw, _ in plain_chunks(self.sent))
        assert not self.unsent or self.reason == _splice.BLOCKED
        assert self.splicer.silence(self.id) == math.inf
        for end in (self.engine, self.source, self.target, self.client):
            end.close()

    def _left(self) -> bytes:
        size = unread(self.source)
        return self.source.recv(size, socket.MSG_WAITALL) if size else b""


def take(splicer: Any, streams: dict[int, Stream]) -> None:
    if select.select([splicer.fileno()], [], [], 0)[0]:
        for report in splicer.take():
            streams[report[0]].note(report)


payloads = st.lists(
    st.sampled_from([b"data: x\n\n", b": c\n\n", b"data: " + b"y" * 90 + b"\n\n", b"\n\n"]),
    min_size=1,
    max_size=4,
).map(b"".join)
sizes = st.sampled_from(["%x", "%X", "%04x", "%05X"])
odd_payloads = st.sampled_from(
    [b"data: mark\n\n", b"data: x", b"x\r\n\r\n", b"data: [DONE]\n\n", b"\n", b"z" * 65_520]
)
parts = st.one_of(
    *[st.builds(chunk, payloads, sizes)] * 6,
    st.integers(65_000, 65_530).map(lambda size: chunk(b"x" * (size - 2) + b"\n\n")),
    st.builds(chunk, odd_payloads, sizes),
    st.builds(chunk, payloads, st.sampled_from(["%07x", "%x;a=b", "%x ", "0x%x"])),
    st.binary(max_size=6),
    st.just(b"0\r\n\r\n"),
)
streams_of_bytes = st.lists(parts, max_size=12).map(b"".join)
cuts = st.lists(st.integers(1, 300), min_size=1, max_size=8)
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture(scope="module")
def splicer() -> Iterator[Any]:
    """One for all, so that its slots are used again and again."""
    made = _splice.Splicer(REPORT_BYTES)
    yield made
    made.close()


def cut(data: bytes, lengths: list[int]) -> Iterator[bytes]:
    # Large ones in few pieces; each costs a wait.
    place, turns = 0, itertools.cycle(lengths)
    while place < len(data):
        length = next(turns) * max(1, len(data) // 5_000)
        yield data[place : place + length]
        place += length


@settings(max_examples=300, deadline=None, suppress_health_check=CHECKS)
@given(streams_of_bytes, cuts, st.booleans(), st.booleans())
def test_any_stream_in_any_pieces(
    splicer: Any, data: bytes, lengths: list[int], keep: bool, reads: bool
) -> None:
    stream = Stream(splicer, keep, reads)
    streams = {stream.id: stream}
    for piece in cut(data, lengths):
        stream.send(piece, streams)
        if stream.reason is not None:
            break
    stream.finish(streams)
    assert stream.reason in ENDED | BEFORE_THE_END
    stream.check()


@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS)
@given(
    st.lists(streams_of_bytes, min_size=1, max_size=4),
    cuts,
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("send send send send stop".split()))),
)
def test_any_streams_beside_each_other(
    splicer: Any, datas: list[bytes], lengths: list[int], steps: list[tuple[int, str]]
) -> None:
    streams: dict[int, Stream] = {}
    current: dict[int, tuple[Stream, Iterator[bytes]]] = {}
    for number, step in steps:
        data = datas[number % len(datas)]
        if number not in current:
            stream = Stream(splicer)
            streams[stream.id] = stream
            current[number] = stream, cut(data, lengths)
        stream, pieces = current[number]
        if step == "stop":
            # Reports of others that have not been taken are still there.
            take(splicer, streams)
            stream.stop()
            del current[number]
        else:
            stream.send(next(pieces, b""), streams)
    for stream, _ in current.values():
        if stream.reason is None:
            stream.finish(streams)
    for stream in streams.values():
        stream.check()


def test_what_nobody_asks_for_is_bounded() -> None:
    made, report = _splice.Splicer(1_000), chunk(b"x" * 498 + b"\n\n")
    stream = Stream(made)
    files = len(os.listdir("/proc/self/fd"))
    stream.engine.setblocking(True)

    def send() -> None:
        with contextlib.suppress(BrokenPipeError):
            stream.engine.sendall(report * 2_000)

    sending = threading.Thread(target=send)
    sending.start()

    def given_back() -> bool:
        stream.receive()
        assert len(stream.got) < len(report) * 2_000
        return len(os.listdir("/proc/self/fd")) < files

    wait_for(given_back, "the stream is given back", pause=0)
    (told,) = made.take()
    assert told[1] == _splice.UNHEARD
    assert 16_000 <= len(told[4]) < 16_000 + 65_536
    stream.source.close()
    sending.join()
    made.close()


def test_it_leaves_no_file_descriptor_behind() -> None:
    files = sorted(os.listdir("/proc/self/fd"))
    made = _splice.Splicer(1)
    streams = [Stream(made) for _ in range(10)]
    streams[0].stop()
    for end in (-1, 10**6):
        for pair in ((end, streams[0].target.fileno()), (streams[0].source.fileno(), end)):
            with pytest.raises(OSError, match="descriptor"):
                made.add(*pair, MARKS, True)
    with pytest.raises(ValueError, match="empty"):
        made.add(streams[0].source.fileno(), streams[0].target.fileno(), (b"",), True)
    made.close()
    with pytest.raises(ValueError, match="closed"):
        made.add(streams[0].source.fileno(), streams[0].target.fileno(), MARKS, True)
    assert made.take() == []
    for stream in streams:
        assert made.stop(stream.id) is None
        for end in (stream.engine, stream.source, stream.target, stream.client):
            end.close()
    del made, streams, stream
    assert sorted(os.listdir("/proc/self/fd")) == files


async def test_an_error_in_one_report_loses_no_other(caplog: pytest.LogCaptureFixture) -> None:
    splices = Splices()
    told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    ends = [*socket.socketpair(), *socket.socketpair()]
    others = [*socket.socketpair(), *socket.socketpair()]
    splices.begin(ends[1].fileno(), ends[2].fileno(), MARKS, True, lambda report: 1 / 0)  # type: ignore[arg-type, return-value]
    splices.begin(
        others[1].fileno(),
        others[2].fileno(),
        MARKS,
        True,
        lambda report: told.set_result(report[3]),
    )
    # Neither is asked for before both are there.
    for engine in (ends[0], others[0]):
        engine.sendall(b"0\r\n\r\n")
    wait_for(lambda: not unread(ends[1]) and not unread(others[1]), "both were read", pause=0)
    assert await asyncio.wait_for(told, 60) == b"0\r\n\r\n"
    assert "ZeroDivisionError" in caplog.text
    assert splices.count == 0
    splices.close()
    for end in (*ends, *others):
        end.close()
