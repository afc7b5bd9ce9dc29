"""Clients with manners that HTTP allows and few have."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from router_rig import DEADLINE, Router, StartRouter, both, wait_for

PATHS = ["/v1/chat/completions", "/v1/messages", "/score"]
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


def request(
    body: Any, *lines: str, path: str = "/v1/chat/completions", version: str = "1.1"
) -> bytes:
    """A request's bytes."""
    raw = json.dumps(body).encode()
    head = [f"POST {path} HTTP/{version}", "Host: x", *lines, f"Content-Length: {len(raw)}"]
    return "".join(f"{line}\r\n" for line in head).encode() + b"\r\n" + raw


def hello(*, stream: bool = False) -> dict[str, Any]:
    return {
        "model": "fake",
        "input": "x",
        "stream": stream,
        "messages": [{"role": "user", "content": "Hello"}],
    }


class Client(socket.socket):
    """What has come and has not been asked for is kept."""

    got = b""

    def until(self, mark: bytes) -> bytes:
        """What comes up to and with ``mark``."""
        while mark not in self.got:
            piece = self.recv(65536)
            assert piece, self.got
            self.got += piece
        found, _, self.got = self.got.partition(mark)
        return found + mark

    def rest(self) -> bytes:
        """Until the router closes."""
        while piece := self.recv(65536):
            self.got += piece
        return self.got


@contextmanager
def client_of(router: Router) -> Iterator[Client]:
    with Client() as client:
        client.settimeout(DEADLINE)
        client.connect(("127.0.0.1", int(router.url.rpartition(":")[2])))
        yield client


@contextmanager
def stream_under_way(router: Router) -> Iterator[Client]:
    router.decode[0].hold_after = 3
    with client_of(router) as client:
        client.sendall(request(hello(stream=True)))
        wait_for(lambda: router.decode[0].held, "the stream is under way")
        yield client


def answers_in(raw: bytes) -> list[int]:
    """The status of every answer."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", raw)]


# Half a connection.


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_ends_its_sending_gets_its_answer(router: Router, path: str) -> None:
    with client_of(router) as client:
        client.sendall(request(hello(), path=path))
        client.shutdown(socket.SHUT_WR)
        raw = client.rest().replace(GO_ON, b"")
    assert answers_in(raw) == [200]
    assert json.loads(raw.partition(b"\r\n\r\n")[2])
    router.check_secrets(raw)


@both
def test_a_client_that_ends_its_sending_gets_its_stream(router: Router) -> None:
    router.decode[0].hold_after = 3
    with client_of(router) as client:
        client.sendall(request(hello(stream=True)))
        client.shutdown(socket.SHUT_WR)
        wait_for(lambda: router.decode[0].held, "the stream is under way")
        router.decode[0].released.set()
        raw = client.rest().replace(GO_ON, b"")
    assert answers_in(raw) == [200]
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert router.decode[0].aborted == 0


def test_a_client_that_ends_its_sending_and_then_leaves_is_gone(router: Router) -> None:
    router.decode[0].trickle = True
    with client_of(router) as client:
        client.sendall(request(hello(stream=True)))
        client.shutdown(socket.SHUT_WR)
        client.until(b"data: ")
    wait_for(lambda: router.decode[0].aborted == 1, "decode's request ends")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_leaves_before_its_answer_is_gone(router: Router, version: str) -> None:
    router.prefill[0].faults.append("hang")
    with client_of(router) as client:
        client.sendall(request(hello(), version=version))
        wait_for(lambda: router.prefill[0].requests, "prefill has it")
    wait_for(lambda: router.prefill[0].aborted == 1, "prefill's request ends")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", request(hello())[:-1]])
def test_a_client_that_ends_its_sending_too_early_is_gone(router: Router, sent: bytes) -> None:
    with client_of(router) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert client.rest() == b""
    assert router.prefill[0].requests == []


# Expect.


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_waits_is_told_to_go_on(router: Router, path: str) -> None:
    head, _, body = request(hello(), "Expect: 100-continue", path=path).partition(b"\r\n\r\n")
    with client_of(router) as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.until(b"\r\n\r\n") == GO_ON
        client.sendall(body)
        assert answers_in(client.until(b"\r\n\r\n")) == [200]


def test_a_client_that_waits_for_an_error_gets_it_at_once(
    start_router: StartRouter, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    router = start_router(api_keys_file=str(keys), max_body_bytes=1000)
    large = "POST /v1/messages HTTP/1.1", "Host: x", "Content-Length: 1001", "Expect: 100-continue"
    for line, status in (("x-api-key: secret", 413), ("x-api-key: no", 401)):
        with client_of(router) as client:
            client.sendall("\r\n".join([*large, line, "", ""]).encode())
            head = client.until(b"\r\n\r\n")
            assert answers_in(head) == [status]
            assert json.loads(client.until(b"}}"))["type"] == "error"


@pytest.mark.parametrize("path", PATHS)
def test_another_expectation_is_an_error_of_the_path_s_form(router: Router, path: str) -> None:
    answer = router.post(hello(), path, expect="a-miracle")
    error = answer.json["error"]
    assert (answer.status, error["type"]) == (417, "invalid_request_error")
    assert ("code" in error) == (path != "/v1/messages")
    assert router.prefill[0].requests == router.decode[0].requests == []


# One request after the other.


@both
def test_requests_that_come_while_a_stream_runs_wait_for_its_end(router: Router) -> None:
    with stream_under_way(router) as client:
        for path in PATHS:
            client.sendall(request(hello(), path=path))
        client.sendall(request(hello(stream=True), "Connection: close"))
        router.decode[0].hold_after = None
        router.decode[0].released.set()
        raw = client.rest()
    assert answers_in(raw) == [200] * 5
    streams = [part for part in raw.split(b"HTTP/1.1 ")[1:] if b"event-stream" in part]
    assert [raw.index(part) < 20 for part in streams] == [True, False]
    assert all(part.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for part in streams)
    assert raw.endswith(streams[1])


@both
def test_what_is_no_request_does_not_break_the_stream_before_it(router: Router) -> None:
    with stream_under_way(router) as client:
        client.sendall(b"\x16\x03\x01 no request\r\n\r\n")
        router.decode[0].released.set()
        raw = client.rest()
    stream, _, after = raw.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answers_in(stream) == [200]
    assert after.startswith(b"HTTP/1.0 400 ")


def test_a_connection_ends_where_its_client_says_so(router: Router) -> None:
    with client_of(router) as client:
        client.sendall(request(hello(), path="/score"))
        client.until(b'"score":1.0}')
        client.sendall(request(hello(), "Connection: close", path="/score"))
        client.until(b'"score":1.0}')
        assert client.rest() == b""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_without_chunks_ends_with_its_connection(router: Router, path: str) -> None:
    """HTTP/1.0 has no other end for it, whatever the client wants of the connection."""
    body = hello(stream=True)
    with client_of(router) as client:
        client.settimeout(10)
        client.sendall(request(body, "Connection: keep-alive", path=path, version="1.0"))
        raw = client.rest()
    assert raw.startswith(b"HTTP/1.0 200 ")
    assert b"chunked" not in raw
    assert raw.endswith(b"\n\n")


def test_a_connection_of_http_1_0_is_kept_where_that_can_be(router: Router) -> None:
    asked = request(hello(), "Connection: keep-alive", path="/score", version="1.0")
    with client_of(router) as client:
        for _ in range(2):
            client.sendall(asked)
            assert b"\r\nConnection: keep-alive\r\n" in client.until(b"\r\n\r\n")
            client.until(b'"score":1.0}')


def test_many_requests_at_once_are_answered_in_turn(router: Router) -> None:
    """More than aiohttp parses ahead, and more than the socket holds."""
    many = 300
    asked = b"".join(
        request({"input": f"{number}" + "x" * 3000}, path="/score") for number in range(many)
    )
    with client_of(router) as client:
        sender = threading.Thread(target=client.sendall, args=(asked,))
        sender.start()
        raw = b""
        while len(re.findall(rb'"score":1\.0\}', raw)) < many:
            piece = client.recv(65536)
            assert piece
            raw += piece
        sender.join()
    assert [int(n) for n in re.findall(rb'"input":"(\d+)x', raw)] == list(range(many))


def test_methods_without_a_body_get_none(router: Router) -> None:
    with client_of(router) as client:
        for path in (*PATHS, "/v1/models", "/nowhere"):
            client.sendall(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            status = answers_in(client.until(b"\r\n\r\n"))
            assert status == [404 if path == "/nowhere" else 405]
        # Nothing was left between the answers.
        client.sendall(request(hello(), "Connection: close"))
        assert answers_in(client.rest()) == [200]


# Trailers.

ODD_FIRST = {
    "turn": "POST /v1/chat/completions",
    "stream": "POST /v1/chat/completions",
    "other": "POST /score",
    "no body wanted": "GET /health",
    "no path": "POST /nowhere",
    "no method": "PUT /score",
    "expectation": "POST /nowhere",
}


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
@pytest.mark.parametrize("name", ODD_FIRST)
def test_a_trailer_is_no_header_of_the_next_request(
    router: Router, conversation: str, name: str, later: bool
) -> None:
    """Behind a proxy the next request on a connection may be somebody else's."""
    raw = json.dumps(hello(stream=name == "stream")).encode()
    head = f"{ODD_FIRST[name]} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    if name == "expectation":
        head += "Expect: a-miracle\r\n"
    first = head.encode() + b"\r\n%x\r\n%b\r\n0\r\n" % (len(raw), raw)
    first += b"X-Late: 1\r\nAuthorization: Bearer of-another\r\n\r\n"
    second = request(hello(), f"X-Session-ID: {conversation}", "Connection: close")
    with client_of(router) as client:
        client.sendall(first if later else first + second)
        head_got = client.until(b"\r\n\r\n")
        if later:
            with contextlib.suppress(ConnectionError):
                client.sendall(second)
        with contextlib.suppress(ConnectionError):
            client.rest()
    assert head_got.startswith(b"HTTP/1.1 ")
    sent = [headers for engine in router.engines for headers in engine.request_headers]
    assert [headers.get("Authorization") for headers in sent] == [None] * len(sent)
