"""Limits, drain and reload."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from router_rig import Answer, Chat, Router, StartRouter, both, wait_for

from fake_engine import FakeEngine, Script


def in_background(router: Router, body: Any, answers: list[Any]) -> threading.Thread:
    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            try:
                got = client.post(router.url + "/v1/chat/completions", json=body)
                answers.append(Answer(got.status_code, got.headers, got.content))
            except httpx.HTTPError as error:
                answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def refuses(router: Router) -> bool:
    parts = urlsplit(router.url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) != 0


@both
def test_sigterm_lets_streams_end(start_router: StartRouter) -> None:
    router = start_router()
    router.decode[0].hold_after = 3
    answers: list[Any] = []
    thread = in_background(router, Chat(router, "c").body("Hello"), answers)
    wait_for(lambda: router.decode[0].requests, "the stream begins")
    kept = httpx.Client()
    assert kept.get(router.url + "/v1/models").status_code == 200
    router.process.send_signal(signal.SIGTERM)
    wait_for(lambda: refuses(router), "no new connections")
    # A connection that was there before is told.
    wait_for(lambda: said_no(kept, router), "no new requests")
    router.decode[0].released.set()
    thread.join()
    assert answers[0].message["content"].startswith("answer-")
    assert router.process.wait(30) == 0
    assert "cut off" not in router.log


def said_no(client: httpx.Client, router: Router) -> bool:
    try:
        answer = client.get(router.url + "/v1/models")
    except httpx.HTTPError:
        return True
    return answer.status_code == 503 and "retry-after" in answer.headers


@both
@pytest.mark.parametrize("again", [False, True], ids=["bound", "second-signal"])
def test_what_outlives_the_drain_is_cut_off_cleanly(start_router: StartRouter, again: bool) -> None:
    router = start_router(drain_timeout=60.0 if again else 0.3)
    router.decode[0].hold_after = 3
    streamed: list[Any] = []
    first = in_background(router, Chat(router, "c").body("Hello"), streamed)
    wait_for(lambda: len(router.decode[0].requests) == 1, "the stream begins")
    router.prefill[0].faults.append("hang")
    waiting: list[Any] = []
    second = in_background(router, Chat(router, "d").body("Hello"), waiting)
    wait_for(lambda: len(router.prefill[0].requests) == 2, "the other waits for prefill")
    router.process.send_signal(signal.SIGTERM)
    if again:
        wait_for(lambda: "draining" in router.log, "the drain begins")
        router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(30) == 0
    first.join()
    second.join()
    events = [line[6:] for line in streamed[0].raw.split(b"\n") if line.startswith(b"data: ")]
    assert "the router shuts down" in json.loads(events[-1])["error"]["message"]
    assert waiting[0].status == 503
    assert "2 requests were cut off" in router.log
    wait_for(lambda: router.decode[0].aborted == router.prefill[0].aborted == 1, "engines stop")


@both
def test_sighup_takes_new_legs_without_dropping_a_stream(start_router: StartRouter) -> None:
    router = start_router()
    router.decode[0].hold_after = 3
    chat, answers = Chat(router, "c"), []
    thread = in_background(router, chat.body("Hello"), answers)
    wait_for(lambda: router.decode[0].requests, "the stream begins")
    new = FakeEngine("decode").start()
    try:
        router.hang_up(decode={"decode-9": {"url": new.url}})
        wait_for(lambda: "reloaded: prefill-0, decode-9" in router.log, "the reload")
        router.decode[0].released.set()
        thread.join()
        assert answers[0].message["content"].startswith("answer-")
        chat.messages = [*chat.body("Hello")["messages"], answers[0].message]
        answer = chat.say("Again")
        # The leg may be on its way out: nothing is read from it any more.
        assert (answer.status, answer.outcome) == (200, "miss")
        assert len(new.requests) == 1
        assert [leg["name"] for leg in router.get("/health").json()["legs"]] == [
            "prefill-0",
            "decode-9",
        ]
    finally:
        new.stop()


def test_a_leg_that_leaves_the_list_is_told_what_nobody_will_read(
    start_router: StartRouter,
) -> None:
    router = start_router(decodes=2)
    chats = [Chat(router, "c"), Chat(router, "d")]
    for chat in chats:
        chat.say("Hello")
    gone, kept = router.decode
    before, amid = (engine.handles[-1]["remote_request_id"] for engine in (gone, kept))
    gone.hold_after = 3
    answers: list[Any] = []
    thread = in_background(router, Chat(router, "e").body("Hello"), answers)
    wait_for(lambda: gone.held, "a stream runs on the leg")
    router.hang_up(decode={"decode-1": {"url": kept.url}})
    # Of the turn before, and of the one that ends after it.
    router.wait_released({before})
    gone.released.set()
    thread.join()
    router.wait_released({gone.handles[-1]["remote_request_id"]})
    assert amid not in kept.released_turns
    assert len(gone.released_turns) == 2


def test_a_config_that_cannot_be_used_changes_nothing(start_router: StartRouter) -> None:
    router = start_router()
    router.hang_up(decode={})
    wait_for(lambda: "not reloaded: " in router.log, "the refusal")
    assert Chat(router, "c").say("Hello").status == 200
    router.hang_up(decode={"decode-0": {"url": router.decode[0].url}}, max_handles=5, native=False)
    wait_for(lambda: "needs a restart: max_handles, native" in router.log, "it is told")


def test_too_many_requests_are_told_to_come_again(start_router: StartRouter) -> None:
    router = start_router(max_requests=1)
    router.decode[0].hold_after = 1
    answers: list[Any] = []
    thread = in_background(router, Chat(router, "c").body("Hello"), answers)
    wait_for(lambda: router.decode[0].requests, "one runs")
    refused = router.post(Chat(router, "d").body("Hello"))
    assert (refused.status, "retry-after" in refused.headers) == (503, True)
    assert router.get("/health").status_code == 200
    router.decode[0].released.set()
    thread.join()
    assert answers[0].status == 200


def test_a_body_that_does_not_arrive_is_a_408(start_router: StartRouter) -> None:
    router = start_router(body_timeout=0.2)
    parts = urlsplit(router.url)
    with socket.create_connection((parts.hostname, parts.port)) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


@contextmanager
def slow_client(router: Router, path: str, body: bytes) -> Iterator[socket.socket]:
    parts = urlsplit(router.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((parts.hostname, parts.port))
        client.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
            % (path.encode(), len(body), body)
        )
        yield client


@both
def test_a_client_that_reads_nothing_is_dropped(start_router: StartRouter) -> None:
    router = start_router(client_stall_timeout=0.3)
    router.decode[0].omit_handles = True  # It would take long over the proof.
    router.decode[0].scripts.append(Script(content="x" * 30_000_000, piece=100_000))
    body = json.dumps(Chat(router, "c").body("Hello")).encode()
    with slow_client(router, "/v1/chat/completions", body):
        wait_for(lambda: router.decode[0].aborted == 1, "the engine's request ends")
    assert router.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/score"])
def test_a_client_that_reads_nothing_of_a_whole_answer_is_dropped(
    start_router: StartRouter, path: str
) -> None:
    router = start_router(client_stall_timeout=0.3)
    router.decode[0].omit_handles = True  # It would take long over the proof.
    router.decode[0].scripts.append(Script(content="x" * 8_000_000))
    body = Chat(router, "c", stream=False).body("Hello")
    if path == "/score":
        body = {"input": "x" * 8_000_000}
    raw = json.dumps(body).encode()
    with slow_client(router, path, raw) as client:
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        ends = f":{client.getpeername()[1]:04X} 0100007F:{client.getsockname()[1]:04X} 01 "
        connections = Path("/proc/net/tcp")
        wait_for(lambda: ends not in connections.read_text(), "the connection is over")


@both
def test_a_slow_client_gets_everything(start_router: StartRouter) -> None:
    router = start_router()
    router.decode[0].omit_handles = True  # It would take long over the proof.
    router.decode[0].scripts.append(Script(content="x" * 3_000_000, piece=50_000))
    body = Chat(router, "c").body("Hello")
    with router.http.stream("POST", router.url + "/v1/chat/completions", json=body) as answer:
        raw = b""
        for number, piece in enumerate(answer.iter_raw(65536)):
            raw += piece
            if number < 5:
                time.sleep(0.05)  # The client is slow; nothing waits for this.
    assert Answer(200, answer.headers, raw).message["content"] == "x" * 3_000_000
