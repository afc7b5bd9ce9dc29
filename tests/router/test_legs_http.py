"""Legs that send what HTTP allows and nobody expects, or more than they were asked for."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_engine import END, HEAD, RawClient, RawEngine, chunk
from router_rig import Router, launch

from fake_engine import FakeEngine

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = HEAD + chunk(EVENT) + chunk(DONE) + END
OTHERS = HEAD + chunk(b'data: {"choices":[{"index":0,"delta":{"content":"secret"}}]}\n\n') + END
BODY = b'{"model":"fake","messages":[{"role":"user","content":"Hi"}],"stream":%b}'
ANSWER = (
    b'{"choices":[{"index":0,"finish_reason":"stop",'
    b'"message":{"role":"assistant","content":"ok"}}]}'
)
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)
PATHS = ["/v1/chat/completions", "/v1/messages"]


@pytest.fixture(scope="module")
def engine() -> Iterator[RawEngine]:
    engine = RawEngine()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def odd(engine: RawEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router whose decode leg's answers are written by the test."""
    folder: Path = tmp_path_factory.mktemp("legs")
    prefill = FakeEngine("prefill").start()
    router = launch(folder, [prefill], [engine])  # type: ignore[list-item]
    yield router
    router.stop()
    prefill.stop()
    assert "Traceback" not in router.log


def ask(
    odd: Router, engine: RawEngine, raw: bytes, path: str, *, stream: bool
) -> tuple[int, bytes]:
    """Status and body of what the client gets."""
    client = RawClient(odd, BODY % (b"true" if stream else b"false"), path)
    leg = engine.next()
    leg.send_all(raw)
    leg.finish()
    answer = client.answer()
    return int(client.got.split(b" ")[1]), answer


BEFORE = {
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n",
    "hints": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 5\r\n\r\n",
    "many": b"HTTP/1.1 102 Processing\r\n\r\n" * 20,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BEFORE)
def test_what_comes_before_the_answer_is_not_the_answer(
    odd: Router, engine: RawEngine, path: str, name: str
) -> None:
    assert ask(odd, engine, BEFORE[name] + WHOLE, path, stream=False) == (200, ANSWER)


AFTER = {
    "an answer": WHOLE,
    "a stream": OTHERS,
    "a head": HEAD,
    "a refusal": b"HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\n{}",
    "garbage": b"garbage",
    "line ends": b"\r\n\r\n",
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", AFTER)
def test_what_comes_after_the_answer_is_nobody_s(
    odd: Router, engine: RawEngine, path: str, name: str, stream: bool
) -> None:
    if stream and path == "/v1/messages":
        whole = HEAD + chunk(b'event: message_stop\ndata: {"type":"message_stop"}\n\n') + END
    else:
        whole = STREAM if stream else WHOLE
    expected = ask(odd, engine, whole, path, stream=stream)
    assert expected[0] == 200
    assert ask(odd, engine, whole + AFTER[name], path, stream=stream) == expected
    # Nor the next client's.
    assert ask(odd, engine, WHOLE, path, stream=False) == (200, ANSWER)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_a_leg_that_changes_the_protocol_has_not_answered(
    odd: Router, engine: RawEngine, path: str, stream: bool
) -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    status, body = ask(odd, engine, switch + WHOLE, path, stream=stream)
    assert (status, "error" in json.loads(body)) == (503, True)
    assert "Traceback" not in odd.log


def test_a_length_that_is_too_short_is_no_other_status(odd: Router, engine: RawEngine) -> None:
    short = WHOLE.replace(b"Content-Length: %d" % len(ANSWER), b"Content-Length: 20")
    status, body = ask(odd, engine, short, "/v1/chat/completions", stream=False)
    assert (status, "error" in json.loads(body)) == (502, True)
    assert ask(odd, engine, WHOLE, "/v1/chat/completions", stream=False) == (200, ANSWER)
