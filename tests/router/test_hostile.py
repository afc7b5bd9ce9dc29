"""Input that means harm: broken HTTP, smuggled requests, bodies of any shape."""

import json
import re
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_rig import Chat, Router, StartRouter, wait_for

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"messages":[{"role":"user","content":"Hi"}]}'
SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n" + (
    b'{"prompt":"x"}'
)

# The machine may be busy, and the router is left as it was found.
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def exchange(router: Router, sent: bytes, seconds: float = 5.0) -> bytes:
    """What comes back until the router closes, or has answered and is silent."""
    parts = urlsplit(router.url)
    got = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=seconds) as client:
        try:
            client.sendall(sent)
            while piece := client.recv(65536):
                got += piece
                client.settimeout(0.3)
        except (TimeoutError, ConnectionError):
            pass
    return got


def with_length(body: bytes, *lines: bytes) -> bytes:
    length = b"Content-Length: %d" % len(body)
    return CHAT + b"".join(line + b"\r\n" for line in (*lines, length)) + b"\r\n" + body


BROKEN = {
    "not http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04",
    "http 0.9": b"GET /health\r\n\r\n",
    "no version": b"POST /v1/chat/completions\r\nHost: x\r\n\r\n",
    "version": b"GET /health HTTP/9.9\r\n\r\n",
    "nul in the path": b"GET /he\x00alth HTTP/1.1\r\nHost: x\r\n\r\n",
    "nul in a header": with_length(BODY, b"X-Session-ID: a\x00b"),
    "two lengths": CHAT + b"Content-Length: 45\r\nContent-Length: 5\r\n\r\n" + BODY,
    "a list of lengths": CHAT + b"Content-Length: 45, 5\r\n\r\n" + BODY,
    "signed length": CHAT + b"Content-Length: +45\r\n\r\n" + BODY,
    "negative length": CHAT + b"Content-Length: -1\r\n\r\n" + BODY,
    "hex length": CHAT + b"Content-Length: 0x2d\r\n\r\n" + BODY,
    "huge length": CHAT + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "length and chunks": CHAT
    + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "chunks and length": CHAT
    + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "chunked twice": CHAT
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "other encoding": CHAT + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "space before colon": CHAT + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "folded header": CHAT + b"Content-Length:\r\n 45\r\n\r\n" + BODY,
    "chunk size": CHAT + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n{}",
    "negative chunk": CHAT + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}",
    "unfinished chunk": CHAT + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}X\r\n0\r\n\r\n",
    "bare line feeds": b"POST /v1/chat/completions HTTP/1.1\nHost: x\nContent-Length: 45\n\n"
    + BODY,
    "long path": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": with_length(BODY, b"X-Session-ID: " + b"x" * 20_000),
    "many headers": with_length(BODY, *(b"X-%d: 1" % n for n in range(500))),
    "endless header": CHAT + b"X-A: " + b"a" * 200_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_requests_reach_no_engine(router: Router, name: str) -> None:
    got = exchange(router, BROKEN[name])
    answers = re.findall(rb"HTTP/\d\.\d (\d{3}) ", got)
    assert answers in ([], [b"400"], [b"505"]), got[:200]
    if answers:
        head, _, body = got.partition(b"\r\n\r\n")
        assert b"application/json" in head
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == (int(answers[0]), "invalid_request_error")
        assert "\n" not in error["message"]
    assert router.prefill[0].requests == router.decode[0].requests == []
    assert router.get("/metrics").status_code == 200


ODD = {
    "pipelined": with_length(BODY) + with_length(BODY),
    "chunked": CHAT + b"Transfer-Encoding: chunked\r\n\r\n2d;x=y\r\n" + BODY + b"\r\n0\r\n\r\n",
    "absolute": with_length(BODY).replace(b" /v1", b" http://elsewhere.example/v1", 1),
    "expect": with_length(BODY, b"Expect: 100-continue"),
    "upgrade": with_length(BODY, b"Connection: Upgrade", b"Upgrade: h2c"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_are_answered(router: Router, name: str) -> None:
    got = exchange(router, ODD[name])
    assert got.count(b"HTTP/1.1 200 ") == (2 if name == "pipelined" else 1), got[:300]
    assert len(router.decode[0].requests) == (2 if name == "pipelined" else 1)
    router.check_secrets(got)


def test_what_a_client_names_is_not_where_the_request_goes(router: Router) -> None:
    for line in (b"X-Forwarded-Host: 10.0.0.1", b"X-Original-URL: /admin/legs", b"Via: x"):
        got = exchange(router, with_length(BODY, line))
        assert got.startswith(b"HTTP/1.1 200")
        sent = {name.lower() for name in router.decode[0].request_headers[-1]}
        assert line.partition(b":")[0].decode().lower() not in sent


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[],"kv_transfer_params":{"a":1},"kv_transfer_params":null}',
        b'{"messages":[],"kv\\u005ftransfer_params":{"do_remote_prefill":true}}',
        b'{"kv_transfer_params":null,"messages":[],"kv_transfer_params":{"do_remote_prefill":1}}',
        b'{"messages":[],"vllm_xargs":{"kv_transfer_params":{}},"vllm_xargs":null}',
        b'{"messages":[],"vllm_xargs":{"kv_transf\\u0065r_params":{"do_remote_prefill":true}}}',
    ],
)
def test_transfer_parameters_cannot_be_hidden(router: Router, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/score"):
        router.post(body, path)
        for engine in router.engines:
            seen = [*(one["body"] for one in engine.others), *engine.requests]
            for fields in seen:
                params = fields.get("kv_transfer_params") or {}
                assert "a" not in params
                assert params.get("do_remote_prefill") is not True or engine.role == "decode"
                assert "kv_transfer_params" not in (fields.get("vllm_xargs") or {})
        router.reset()


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = """
    model messages prompt stream stream_options n max_tokens stop tools conversation_id
    kv_transfer_params vllm_xargs request_id echo logprobs user chat_template_kwargs best_of
    add_generation_prompt continue_final_message prompt_embeds truncate_prompt_tokens
""".split()
bodies = st.dictionaries(st.sampled_from(FIELDS), anything, max_size=6)
messages = st.lists(
    st.dictionaries(
        st.sampled_from("role content tool_calls name reasoning tool_call_id".split()),
        anything,
        max_size=4,
    ),
    max_size=3,
)


@settings(max_examples=150, deadline=None, suppress_health_check=CHECKS)
@given(
    bodies,
    st.one_of(st.none(), messages),
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]),
)
def test_any_json_body_is_answered(
    router: Router, body: dict[str, Any], chat: list[Any] | None, path: str
) -> None:
    for engine in router.engines:
        # Whatever it makes of such a body; the router has to get it there and back.
        engine.faults.extend([422] * 3)
    if chat is not None:
        body = {**body, "messages": chat}
    answer = router.post(body, path)
    assert answer.status in (400, 422)
    assert "error" in answer.json
    router.reset()


@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS)
@given(st.binary(max_size=300), st.sampled_from([b"", b'{"messages":[', BODY]))
def test_any_bytes_are_answered(router: Router, raw: bytes, before: bytes) -> None:
    answer = router.post(before + raw)
    assert answer.status in (200, 400)
    router.reset()


@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS)
@given(
    st.sampled_from(
        "X-Session-ID X-Request-Id traceparent Authorization X-My-Chat Accept Content-Type".split()
    ),
    st.binary(min_size=1, max_size=40).map(
        lambda raw: bytes(b for b in raw if b >= 32 and b != 127) or b"x"
    ),
)
def test_any_header_value_is_answered(router: Router, name: str, value: bytes) -> None:
    line = name.encode() + b": " + value
    got = exchange(router, with_length(BODY, line, b"Connection: close"))
    assert got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")), got[:200]
    router.reset()


@pytest.mark.parametrize("garbage", [b"", b"\x00\xff", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_an_engine_that_speaks_no_http_is_an_error(
    start_router: StartRouter, garbage: bytes
) -> None:
    router = start_router()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        router.hang_up(prefill={"odd": {"url": f"http://127.0.0.1:{port}"}})

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.settimeout(5)
                    try:
                        client.recv(65536)
                        client.sendall(garbage)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        wait_for(lambda: "reloaded: odd" in router.log, "the odd leg")
        answer = router.post(Chat(router, "c", stream=False).body("Hello"))
        assert answer.status in (502, 503)
        assert str(port) not in json.dumps(answer.json)
        listener.shutdown(socket.SHUT_RDWR)
