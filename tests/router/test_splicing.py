"""Streams on their way through the native part: every byte, every end, and back to Python."""

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from resource import RLIMIT_NOFILE, prlimit
from typing import Any

import pytest
from raw_engine import END, HEAD, RawClient, RawEngine, RawStream, chunk, spliced
from router_rig import Chat, Router, StartRouter, both, launch, wait_for

from fake_engine import FakeEngine, Script
from pd_router import splicing

BUILT = splicing._splice is not None
needs_native = pytest.mark.skipif(not BUILT, reason="the native part was not built")


def event(text: str, **fields: Any) -> bytes:
    """As vLLM sends it."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **fields}).encode() + b"\n\n"


BODY = b'{"model":"fake","stream":true,"messages":[{"role":"user","content":"Hi"}]}'
PLAIN = event("plain")
DONE = b"data: [DONE]\n\n"
HANDLED = b'data: {"a": 1, "kv_transfer_params": {"remote_host": "10.9.8.7"}}\n\n'
LARGE = chunk(b"data: " + b"x" * 30_000 + b"\n\n")
TWO_CHUNKS = chunk(b"data: 1\n\n" + b": c\n\n") + chunk(b"data: 3\n\n" * 2)


@dataclass
class Side:
    """A router with or without its native part, and the decode leg behind it."""

    router: Router
    engine: RawEngine
    native: bool

    def begin(self, path: str = "/v1/chat/completions", **how: Any) -> tuple[RawClient, RawStream]:
        """A stream that is under way: where that can be, in the native part."""
        client = RawClient(self.router, BODY, path, **how)
        stream = self.engine.next()
        stream.send(HEAD + chunk(PLAIN))
        self.wait_spliced(1)
        return client, stream

    def wait_spliced(self, count: int) -> None:
        if self.native:
            wait_for(lambda: spliced(self.router) == count, f"{count} streams are spliced")

    def stop(self) -> None:
        self.router.stop()
        self.engine.stop()
        assert "Traceback" not in self.router.log
        assert "unexpected" not in self.router.log

    def through(self, pieces: list[bytes]) -> bytes:
        """What the client gets of these writes of the engine."""
        client, stream = self.begin()
        for piece in pieces:
            stream.send(piece)
        stream.finish()
        answer = client.answer()
        self.router.check_secrets(answer)
        return answer.removeprefix(PLAIN)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Side]]:
    prefill, folder = FakeEngine("prefill").start(), tmp_path_factory.mktemp("splicing")
    started = []
    for native in (True, False):
        engine = RawEngine()
        router = launch(folder, [prefill], [engine], native=native)  # type: ignore[list-item]
        started.append(Side(router, engine, native and BUILT))
    yield started
    for side in started:
        side.stop()
    prefill.stop()


@pytest.fixture(params=[0, 1], ids=["native", "python"])
def side(sides: list[Side], request: pytest.FixtureRequest) -> Side:
    return sides[request.param]


StartSide = Callable[..., Side]


@pytest.fixture
def start_side(tmp_path: Path, native: bool) -> Iterator[StartSide]:
    """A router of a test's own."""
    started: list[Side] = []

    def start(**settings: Any) -> Side:
        prefill, engine = FakeEngine("prefill").start(), RawEngine()
        router = launch(tmp_path, [prefill], [engine], native=native, **settings)  # type: ignore[list-item]
        started.append(Side(router, engine, native and BUILT))
        return started[-1]

    yield start
    for side in started:
        side.stop()
        side.router.prefill[0].stop()


WHOLE: dict[str, tuple[list[bytes], bytes]] = {
    "several events in a chunk": ([chunk(PLAIN * 3), chunk(PLAIN)], PLAIN * 4),
    "several chunks in a write": ([chunk(PLAIN) * 20], PLAIN * 20),
    "a comment": ([chunk(b": ping\n\n"), chunk(PLAIN)], b": ping\n\n" + PLAIN),
    "CRLF": ([chunk(b"data: 1\r\n\r\n"), chunk(PLAIN)], b"data: 1\r\n\r\n" + PLAIN),
    "CR": ([chunk(b"data: 1\r\r"), chunk(PLAIN)], b"data: 1\r\r" + PLAIN),
    "CRLF in two chunks": (
        [chunk(b"data: 1\r\n\r"), chunk(b"\n"), chunk(PLAIN)],
        b"data: 1\r\n\r\n" + PLAIN,
    ),
    "named events": (
        [chunk(b"event: a\nid: 7\ndata: 1\n\n")] * 2,
        b"event: a\nid: 7\ndata: 1\n\n" * 2,
    ),
    "nothing but line ends": ([chunk(b"\n\n"), chunk(PLAIN)], b"\n\n" + PLAIN),
    "extensions": ([chunk(PLAIN, b"%x;a=b" % len(PLAIN)), chunk(PLAIN)], PLAIN * 2),
    "a quoted extension": ([chunk(PLAIN, b'%x;a="b"' % len(PLAIN)), chunk(PLAIN)], PLAIN * 2),
    "upper case": ([chunk(PLAIN, b"%X" % len(PLAIN)), chunk(PLAIN)], PLAIN * 2),
    "zeros before": ([chunk(PLAIN, b"%05x" % len(PLAIN)), chunk(PLAIN)], PLAIN * 2),
    "many zeros": ([chunk(PLAIN, b"%020x" % len(PLAIN)), chunk(PLAIN)], PLAIN * 2),
    "a trailer": ([chunk(PLAIN) + chunk(DONE) + b"0\r\nX-Late: 1\r\n\r\n"], PLAIN + DONE),
    "an event in two chunks": ([chunk(PLAIN[:9]), chunk(PLAIN[9:]), chunk(PLAIN)], PLAIN * 2),
    "events and a start": ([chunk(PLAIN + PLAIN[:9]) + chunk(PLAIN[9:])], PLAIN * 2),
    "a handle": ([chunk(HANDLED), chunk(PLAIN)], b'data: {"a": 1}\n\n' + PLAIN),
    "a handle in the midst": (
        [chunk(PLAIN) + chunk(PLAIN + HANDLED + PLAIN) + chunk(PLAIN)],
        PLAIN * 2 + b'data: {"a": 1}\n\n' + PLAIN * 2,
    ),
    "a handle in two chunks": (
        [chunk(PLAIN) + chunk(HANDLED[:25]) + chunk(HANDLED[25:])],
        PLAIN + b'data: {"a": 1}\n\n',
    ),
    "an error": ([chunk(b'data: {"error": {"code": 1}}\n\n')], b'data: {"error": {"code": 1}}\n\n'),
    "counts": (
        [chunk(event("x", usage={"a": 1})), chunk(PLAIN)],
        event("x", usage={"a": 1}) + PLAIN,
    ),
    "words that end streams": ([chunk(event("[DONE]")), chunk(PLAIN)], event("[DONE]") + PLAIN),
    "not JSON": ([chunk(b"data: {\n\n"), chunk(PLAIN)], b"data: {\n\n" + PLAIN),
    "no text": (
        [chunk(b"data: \xff\xfe\x00\n\n"), chunk(PLAIN)],
        b"data: \xff\xfe\x00\n\n" + PLAIN,
    ),
    "single bytes": (
        [bytes([b]) for b in chunk(PLAIN) + chunk(HANDLED)],
        PLAIN + b'data: {"a": 1}\n\n',
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_same_bytes_arrive(sides: list[Side], name: str) -> None:
    pieces, expected = WHOLE[name]
    ends = [] if pieces[-1].endswith(b"0\r\nX-Late: 1\r\n\r\n") else [chunk(DONE) + END]
    for side in sides:
        assert side.through([*pieces, *ends]) == expected + DONE * bool(ends), side.native


def test_a_cut_at_any_byte_changes_nothing(side: Side) -> None:
    pieces = [
        piece for cut in range(1, len(TWO_CHUNKS)) for piece in (TWO_CHUNKS[:cut], TWO_CHUNKS[cut:])
    ]
    expected = (b"data: 1\n\n" + b": c\n\n" + b"data: 3\n\n" * 2) * (len(pieces) // 2)
    assert side.through([*pieces, chunk(DONE) + END]) == expected + DONE


@pytest.mark.parametrize("size", [65519, 65520, 65521, 65536, 65537, 300_000])
def test_large_chunks(sides: list[Side], size: int) -> None:
    large = b"data: " + b"x" * (size - 8) + b"\n\n"
    for side in sides:
        pieces = [chunk(large), chunk(PLAIN) + chunk(large) + chunk(PLAIN), chunk(DONE) + END]
        assert side.through(pieces) == large + PLAIN + large + PLAIN + DONE


BROKEN = {
    "no end of a chunk": b"%x\r\n" % len(PLAIN) + PLAIN + b"XX" + chunk(PLAIN),
    "no size": b"\r\n" + PLAIN,
    "no number": b"xyz\r\n" + PLAIN,
    "a sign": b"+5\r\n" + PLAIN,
    "a negative size": b"-5\r\n" + PLAIN,
    "a size beyond all": b"f" * 20 + b"\r\n" + PLAIN,
    "bare line feeds": b"%x\n" % len(PLAIN) + PLAIN + b"\n",
    "another answer": HEAD + chunk(PLAIN),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_framing_is_an_error_event(sides: list[Side], name: str) -> None:
    answers = [side.through([chunk(PLAIN) + BROKEN[name]]) for side in sides]
    assert answers[0] == answers[1]
    assert answers[0].startswith(PLAIN)
    assert error_of(answers[0]) == "The answer is incomplete: decode-0: connection broke."


def error_of(answer: bytes) -> str:
    """The message of the error event that the stream ended with."""
    assert DONE not in answer
    last = answer.removesuffix(b"\n\n").rpartition(b"data: ")[2]
    error = json.loads(last)
    return str(error["error"]["message"] if isinstance(error.get("error"), dict) else error)


@needs_native
def test_a_stream_is_native_again_after_a_mark(sides: list[Side]) -> None:
    side = sides[0]
    client, stream = side.begin()
    for marked in (HANDLED, event("[DONE]"), b'data: {"error": 1}\n\n', b"data: 1\r\n\r\n"):
        stream.send(chunk(marked))
        side.wait_spliced(0)
        stream.send(chunk(PLAIN))
        side.wait_spliced(1)
    stream.send(chunk(DONE) + END)
    stream.finish()
    assert client.answer().endswith(PLAIN + DONE)
    side.wait_spliced(0)


def test_nothing_is_spliced_where_it_is_turned_off(sides: list[Side]) -> None:
    side = sides[1]
    client, stream = side.begin()
    stream.send(chunk(PLAIN))
    assert spliced(side.router) == 0
    stream.send(chunk(DONE) + END)
    stream.finish()
    assert client.answer() == PLAIN * 2 + DONE


def test_a_client_of_http_1_0_gets_no_chunks(side: Side) -> None:
    client = RawClient(side.router, BODY, version="1.0")
    stream = side.engine.next()
    stream.send(HEAD + chunk(PLAIN))
    stream.send(chunk(PLAIN))
    assert spliced(side.router) == 0
    stream.send(chunk(DONE) + END)
    stream.finish()
    assert client.answer() == PLAIN * 2 + DONE
    assert b"chunked" not in client.got.lower()


def test_the_engines_connection_is_used_again(side: Side) -> None:
    side.through([chunk(PLAIN), chunk(DONE) + END])
    before = side.engine.connections
    for _ in range(3):
        side.through([chunk(PLAIN), chunk(DONE) + END])
    assert side.engine.connections == before


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("part", [b"", b"4", chunk(PLAIN)[:9], chunk(PLAIN)[:-1]])
def test_an_engine_that_dies_is_an_error_event(
    side: Side, path: str, end: str, part: bytes
) -> None:
    client, stream = side.begin(path)
    stream.send(chunk(PLAIN) + part)
    getattr(stream, end)()
    answer = client.answer()
    assert answer.startswith(PLAIN * 2)
    assert "decode-0: connection broke." in error_of(answer)
    side.wait_spliced(0)


@both
def test_an_engine_that_falls_silent_is_an_error_event(start_side: StartSide) -> None:
    side = start_side(stream_idle_timeout=0.5)
    client, stream = side.begin()
    assert error_of(client.answer()).endswith("decode-0: no answer in time.")
    stream.wait_ended()
    side.wait_spliced(0)


def test_what_goes_on_in_the_native_part_is_no_silence(start_side: StartSide) -> None:
    side = start_side(stream_idle_timeout=1.5)
    client, stream = side.begin()
    over = threading.Timer(2.0, lambda: None)
    over.start()
    while over.is_alive():
        stream.send(chunk(PLAIN))
    stream.send(chunk(DONE) + END)
    stream.finish()
    assert client.answer().endswith(DONE)


@both
def test_a_client_that_reads_nothing_bounds_what_is_read(start_side: StartSide) -> None:
    side = start_side(client_stall_timeout=0.3)
    client, stream = side.begin(reads=False)
    sent = stream.flood(LARGE, 3000)
    # What the kernel keeps for both sockets, and a little; not the 90 MB.
    assert sent < 30_000_000
    stream.wait_ended()
    client.leave()
    side.wait_spliced(0)


def test_a_client_that_reads_late_gets_everything(side: Side) -> None:
    client, stream = side.begin(reads=False)
    numbers = itertools.count()
    texts = [b"data: %d %b\n\n" % (next(numbers), b"x" * 3_000) for _ in range(5_000)]
    sending = threading.Thread(
        target=lambda: [stream.send_all(chunk(text)) for text in texts]  # type: ignore[func-returns-value]
    )
    sending.start()
    side.wait_spliced(0)  # The client blocks: Python has it.
    client.read()
    sending.join()
    stream.send(chunk(DONE) + END)
    stream.finish()
    assert client.answer() == PLAIN + b"".join(texts) + DONE


def test_a_client_that_leaves_ends_the_engines_request(side: Side) -> None:
    for reset in (False, True):
        client, stream = side.begin()
        client.leave(reset=reset)
        stream.wait_ended()
        side.wait_spliced(0)


@pytest.mark.parametrize("pause", [0, 0.001], ids=["at-once", "in-steps"])
def test_clients_that_leave_break_nothing_else(side: Side, pause: float) -> None:
    piece, times = (chunk(PLAIN), 10_000) if pause else (LARGE, 20)
    stayed, held = side.begin()
    for _ in range(2):
        clients = [RawClient(side.router, BODY) for _ in range(20)]
        threads = []
        for stream in [side.engine.next() for _ in clients]:
            stream.send(HEAD + chunk(PLAIN))
            threads.append(threading.Thread(target=stream.flood, args=(piece, times, pause)))
            threads[-1].start()
        for number, client in enumerate(clients):
            wait_for(lambda client=client: len(client.got) > 10_000, "it gets its stream")
            client.leave(reset=bool(number % 4))
        for thread in threads:
            thread.join()
    held.send(chunk(PLAIN) + chunk(DONE) + END)
    held.finish()
    assert stayed.answer() == PLAIN * 2 + DONE
    side.wait_spliced(0)
    assert "Traceback" not in side.router.log


def test_a_flood_does_not_pile_up(side: Side) -> None:
    """The native part is faster than what takes note of what it has passed on."""
    client, stream = side.begin()
    before = side.router.peak_memory()
    stream.flood(LARGE, 2_000)
    stream.send(chunk(DONE) + END)
    stream.finish()
    assert client.answer().endswith(DONE)
    assert side.router.peak_memory() - before < 20_000_000


def test_what_is_not_understood_costs_the_handle_alone(side: Side) -> None:
    reason = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":["x"]}]}\n\n'
    nested = b"data: " + b"[" * 20_000 + b"]" * 20_000 + b"\n\n"
    for odd in (reason, nested):
        pieces = [chunk(HANDLED), chunk(PLAIN), chunk(odd), chunk(PLAIN * 500)]
        expected = b'data: {"a": 1}\n\n' + PLAIN + odd + PLAIN * 500
        assert side.through([*pieces, chunk(DONE) + END]) == expected + DONE


@both
def test_file_descriptors_are_left_for_streams(start_side: StartSide) -> None:
    side = start_side()
    open_now = len(list(Path(f"/proc/{side.router.process.pid}/fd").iterdir()))
    # Two for each stream, and as many again would be too many.
    prlimit(side.router.process.pid, RLIMIT_NOFILE, (2 * open_now + 160,) * 2)
    streams = []
    for _ in range(60):
        client = RawClient(side.router, BODY)
        streams.append((client, side.engine.next()))
        streams[-1][1].send(HEAD + chunk(PLAIN))
    assert not side.native or 0 < spliced(side.router) < 60
    for client, stream in streams:
        stream.send(chunk(PLAIN) + chunk(DONE) + END)
        stream.finish()
        assert client.answer() == PLAIN * 2 + DONE
    side.wait_spliced(0)


@both
@pytest.mark.parametrize("size", [500, 20_000, 120_000])
def test_the_next_turn_finds_the_history(
    start_router: StartRouter, native: bool, size: int
) -> None:
    router = start_router()
    text = "".join(map(str, range(size)))[:size]
    router.decode[0].scripts.append(Script(content=text, piece=50))
    router.decode[0].hold_after = 5
    chat, answers = Chat(router, "c"), []
    thread = threading.Thread(target=lambda: answers.append(chat.say("Hello")))
    thread.start()
    wait_for(lambda: router.decode[0].requests, "the stream begins")
    if native and BUILT:
        wait_for(lambda: spliced(router) == 1, "the stream is spliced")
    router.decode[0].released.set()
    thread.join()
    assert answers[0].message["content"] == text
    again = chat.say("Again")
    assert (again.outcome, again.tokens_read > size) == ("hit", True)


@both
def test_sigterm_lets_a_stream_end(start_side: StartSide) -> None:
    side = start_side()
    client, stream = side.begin()
    side.router.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "draining" in side.router.log, "the drain begins")
    stream.send(chunk(PLAIN) + chunk(DONE) + END)
    stream.finish()
    assert client.answer() == PLAIN * 2 + DONE
    assert side.router.process.wait(30) == 0
    assert "cut off" not in side.router.log


@both
def test_a_drain_that_is_over_is_an_error_event(start_side: StartSide) -> None:
    side = start_side(drain_timeout=0.3)
    client, stream = side.begin()
    stream.send(chunk(PLAIN) + chunk(PLAIN)[:9])
    side.router.process.send_signal(signal.SIGTERM)
    answer = client.answer()
    assert answer.startswith(PLAIN * 2 + b"data: {")
    assert error_of(answer).endswith("decode-0: the router shuts down.")
    stream.wait_ended()
    assert side.router.process.wait(30) == 0


@both
def test_a_stream_outlives_the_fencing_of_its_leg(start_side: StartSide) -> None:
    side = start_side()
    client, stream = side.begin()
    side.engine.refuse()
    wait_for(lambda: side.router.metric("pd_router_leg_up", leg="decode-0") == 0, "it is down")
    stream.send(chunk(PLAIN) + chunk(DONE) + END)
    stream.finish()
    assert client.answer() == PLAIN * 2 + DONE
    side.wait_spliced(0)
