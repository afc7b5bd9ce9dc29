"""Compressed request bodies: read, bounded, and refused in the form that the client reads."""

import gzip
import json
import zlib
from typing import Any

import pytest
from router_rig import Answer, Router

PATHS = {"/v1/chat/completions": "openai", "/v1/messages": "anthropic", "/score": "openai"}
BODY = b'{"messages":[{"role":"user","content":"Gr\xc3\xbc\xc3\x9fe"}]}'
LIMIT = 1_000_000
"""Of the shared router."""


def bare_deflate(body: bytes) -> bytes:
    """Without zlib's header, as some clients understand ``deflate``."""
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(body) + compressor.flush()


def of_size(size: int) -> bytes:
    return b'{"input":"' + b"x" * (size - 12) + b'"}'


def error_of(answer: Answer, path: str) -> dict[str, Any]:
    """The error, in the form that the path's clients read."""
    body = answer.json
    error: dict[str, Any] = body["error"]
    if PATHS[path] == "anthropic":
        assert body["type"] == "error"
        assert error.keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert error["code"] == answer.status
    return error


def seen_by_engines(router: Router) -> list[Any]:
    return [
        seen
        for engine in router.engines
        for seen in (*engine.requests, *(one["body"] for one in engine.others))
    ]


READABLE = {
    "gzip": ("gzip", gzip.compress(BODY)),
    "x-gzip": ("x-gzip", gzip.compress(BODY)),
    "upper case": ("GZIP", gzip.compress(BODY)),
    "deflate": ("deflate", zlib.compress(BODY)),
    "bare deflate": ("deflate", bare_deflate(BODY)),
    "identity": ("identity", BODY),
    "empty": ("", BODY),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", READABLE)
def test_a_compressed_body_is_read(router: Router, path: str, name: str) -> None:
    coding, body = READABLE[name]
    assert router.post(body, path, content_encoding=coding).status == 200
    seen = seen_by_engines(router)
    assert seen
    assert all(one["messages"] == json.loads(BODY)["messages"] for one in seen)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "no such", "gzip, gzip", "ü"])
def test_other_encodings_are_a_415(router: Router, path: str, coding: str) -> None:
    content = router.http.build_request(
        "POST",
        router.url + path,
        content=BODY,
        headers={"Content-Encoding": coding.encode()},
    )
    got = router.http.send(content)
    answer = Answer(got.status_code, got.headers, got.content)
    error = error_of(answer, path)
    assert (answer.status, error["type"]) == (415, "invalid_request_error")
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    assert "gzip, deflate" in error["message"]
    assert seen_by_engines(router) == []


BROKEN = {
    "no gzip": ("gzip", BODY),
    "no deflate": ("deflate", BODY),
    "nothing": ("gzip", b"\x00"),
    "cut off": ("gzip", gzip.compress(BODY)[:-9]),
    "without its end": ("gzip", gzip.compress(BODY)[:-4]),
    "deflate cut off": ("deflate", zlib.compress(BODY)[:-5]),
    "wrong sum": ("gzip", gzip.compress(BODY)[:-8] + b"\0" * 8),
    "bytes after it": ("gzip", gzip.compress(BODY) + b"{}"),
    "other text": ("gzip", gzip.compress(b"hello")[:10] + gzip.compress(BODY)[11:]),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_body_that_is_not_what_its_encoding_says_is_a_400(
    router: Router, path: str, name: str
) -> None:
    coding, body = BROKEN[name]
    answer = router.post(body, path, content_encoding=coding)
    error = error_of(answer, path)
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == f"The request body is not {coding}."
    assert seen_by_engines(router) == []


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_what_a_body_decompresses_to_is_bounded(router: Router, compress: Any) -> None:
    coding = "gzip" if compress is gzip.compress else "deflate"
    for path in PATHS:
        answer = router.post(compress(of_size(LIMIT + 1)), path, content_encoding=coding)
        assert answer.status == 413
        kind = "request_too_large" if path == "/v1/messages" else "invalid_request_error"
        assert error_of(answer, path)["type"] == kind
    assert seen_by_engines(router) == []
    assert router.post(compress(of_size(LIMIT)), "/score", content_encoding=coding).status == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_bomb_takes_no_memory(router: Router, path: str) -> None:
    bomb = gzip.compress(of_size(300 * LIMIT), 9)
    assert len(bomb) < LIMIT
    before = router.peak_memory()
    for _ in range(3):
        assert router.post(bomb, path, content_encoding="gzip").status == 413
    assert router.peak_memory() - before < 30 * LIMIT


def test_too_many_bytes_that_decompress_to_few_are_too_many(router: Router) -> None:
    noise = gzip.compress(of_size(2 * LIMIT), 0)
    assert router.post(noise, "/score", content_encoding="gzip").status == 413
