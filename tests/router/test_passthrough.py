"""Requests that are no turns: passed to the right leg, and nothing of the engines comes back."""

import json
from typing import Any

import httpx
import pytest
from router_rig import Router, StartRouter, wait_for

from fake_engine import NO_PATH, UNREAD_400

COMPUTE = (
    "/detokenize /v1/embeddings /v2/embed /pooling /classify /score /v1/score "
    "/rerank /v1/rerank /v2/rerank /v1/messages/count_tokens"
).split()


def events(raw: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in raw.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("path", COMPUTE)
def test_computations_go_to_prefill(router: Router, path: str) -> None:
    body = {"model": "fake", "input": "x", "conversation_id": "c", "kv_transfer_params": {"a": 1}}
    answer = router.post(body, path)
    assert answer.status == 200
    expected = {"model": "fake", "input": "x"}
    assert answer.json == {"path": path, "role": "prefill", "got": expected, "score": 1.0}
    assert router.decode[0].others == []


def test_computations_go_to_decode_when_no_prefill_leg_is_up(start_router: StartRouter) -> None:
    router = start_router()
    router.prefill[0].stop()
    assert router.post({"input": "x"}, "/score").json["role"] == "decode"


def test_bytes_are_passed_on_with_what_describes_them(router: Router) -> None:
    answer = router.post({"input": "x", "encoding_format": "bytes"}, "/v1/embeddings")
    assert answer.raw == b"\x00\x01\xff"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["metadata"] == '{"n":1}'


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_answers_lose_their_handle_and_nothing_else(router: Router, path: str) -> None:
    body = {"model": "fake", "input": "Hi", "vllm_xargs": {"kv_transfer_params": 1, "top": 2}}
    stripped = router.metric("pd_router_client_kv_params_stripped_total")
    answer = router.post(body, path)
    direct = httpx.post(router.decode[0].url + path, json=body).json()
    assert direct.pop("kv_transfer_params")
    assert answer.json == direct
    assert router.decode[0].others[0]["body"]["vllm_xargs"] == {"top": 2}
    assert router.metric("pd_router_client_kv_params_stripped_total") == stripped + 1


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_streams_are_passed_on_byte_for_byte_but_for_the_handle(
    router: Router, path: str, size: int
) -> None:
    router.decode[0].write_size = size
    body = {"model": "fake", "input": "Hi", "stream": True}
    answer = router.post(body, path)
    direct = httpx.post(router.decode[0].url + path, json=body).content
    expected = events(direct)
    for _, event in expected:
        for name in ("kv_transfer_params", "ec_transfer_params"):
            event.get("response", {}).pop(name, None)
    assert events(answer.raw) == expected
    if path == "/v1/messages":
        assert answer.raw == direct


def test_only_known_headers_reach_the_engine(router: Router) -> None:
    router.post({"input": "x"}, "/v1/responses", cookie="a=b", x_data_parallel_rank="3")
    headers = {name.lower() for name in router.decode[0].others[0]["headers"]}
    assert headers.isdisjoint({"cookie", "x-data-parallel-rank"})


def test_a_stored_response_is_asked_of_the_leg_that_has_it(start_router: StartRouter) -> None:
    router = start_router(decodes=3)
    for number in range(6):
        stream = bool(number % 2)
        answer = router.post({"input": "x", "stream": stream}, "/v1/responses")
        name = events(answer.raw)[0][1]["response"]["id"] if stream else answer.json["id"]
        home = next(leg for leg in router.decode if name.endswith(f"_{leg.port}"))
        seen = len(home.others)
        assert router.get(f"/v1/responses/{name}?stream=false").json()["id"] == name
        assert home.others[-1]["query"] == "stream=false"
        router.post({"input": "y", "previous_response_id": name}, "/v1/responses")
        router.post(b"", f"/v1/responses/{name}/cancel")
        assert [one["method"] for one in home.others[seen:]] == ["GET", "POST", "POST"]


@pytest.mark.parametrize("name", ["..", "a%2f..%2f..%2fcollective_rpc", "a%0d%0ab", "a b"])
def test_no_other_path_can_be_reached_through_a_stored_response(router: Router, name: str) -> None:
    assert router.get(f"/v1/responses/{name}").status_code in (400, 404, 405)
    assert router.decode[0].others == router.prefill[0].others == []


def test_a_named_conversation_stays_with_one_leg(start_router: StartRouter) -> None:
    router = start_router(decodes=3)
    for name in ("a", "b", "c", "d"):
        before = [len(leg.others) for leg in router.decode]
        for _ in range(3):
            router.post({"input": "x"}, "/v1/messages", x_session_id=name)
        after = [len(leg.others) for leg in router.decode]
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 0, 3]


def test_errors_have_the_form_that_the_client_reads(router: Router) -> None:
    for path, fault in (("/v1/messages", 500), ("/v1/responses", 500), ("/score", 500)):
        router.decode[0].faults.append(fault)
        router.prefill[0].faults.append(fault)
        answer = router.post({"input": "x"}, path)
        assert answer.status == 502
        if path == "/v1/messages":
            assert answer.json["type"] == "error"
            assert answer.json["error"]["type"] == "api_error"
        else:
            assert answer.json["error"]["code"] == 502
        router.reset()
    router.decode[0].faults.append(400)
    answer = router.post({"input": "x"}, "/v1/messages")
    assert (answer.status, answer.json["type"]) == (400, "error")
    for body in (b"{", b"[]", b'{"a":' * 5000):
        assert router.post(body, "/v1/messages").json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("status", [400, 404, 422])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_an_engines_refusal_has_the_form_of_its_path(
    router: Router, path: str, status: int
) -> None:
    """vLLM answers in OpenAI's form what it refuses before it looks at the path."""
    engine = router.prefill[0] if path.endswith("count_tokens") else router.decode[0]
    engine.faults.append(UNREAD_400 if status == 400 else status)
    answer = router.post({"messages": "x"}, path)
    assert (answer.status, answer.json["type"]) == (status, "error")
    error = answer.json["error"]
    assert error.keys() == {"type", "message"}
    if status == 400:
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("1 validation error")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings"])
def test_a_path_that_the_engine_lacks_is_an_error_of_its_form(router: Router, path: str) -> None:
    for engine in router.engines:
        engine.faults.append(NO_PATH)
    answer = router.post({"input": "x"}, path)
    assert (answer.status, answer.json["error"]["message"]) == (404, "Not Found")
    assert ("type" in answer.json) == (path == "/v1/messages")


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/score"]
)
def test_no_body_is_no_request(router: Router, path: str) -> None:
    answer = router.post(b"", path)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json["error"]["message"] == "The request body is not valid JSON."
    assert [each.others for each in router.engines] == [[], []]


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/messages", "api_error"), ("/v1/responses", "engine_error")]
)
def test_a_stream_that_breaks_ends_in_an_error_event(router: Router, path: str, name: str) -> None:
    router.decode[0].faults.append("end")
    answer = router.post({"input": "x", "stream": True}, path)
    kind, last = events(answer.raw)[-1]
    assert (answer.status, kind, last["type"]) == (200, "error", "error")
    assert name in (last.get("code"), last.get("error", {}).get("type"))


def test_a_client_that_leaves_aborts_the_engine(router: Router) -> None:
    router.decode[0].hold_after = 1
    body = {"input": "x", "stream": True}
    with router.http.stream("POST", router.url + "/v1/messages", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: router.decode[0].aborted == 1, "the engine's request ends")
