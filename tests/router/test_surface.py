"""The HTTP surface: bytes passed on, bytes held back, error shapes, logs, command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_rig import Chat, Router, StartRouter, both, launch, wait_for

from fake_engine import FakeEngine, Script
from pd_connector import telemetry
from pd_connector.contract import Outcome
from pd_router.__main__ import main


@both
def test_a_stream_is_passed_on_byte_for_byte_but_for_the_handle(
    router: Router, conversation: str
) -> None:
    text = 'Grüße \U0001f600 and "quotes"'
    router.decode[0].report_usage_details = False
    router.decode[0].scripts.extend([Script(content=text), Script(content=text)])
    body = Chat(router, conversation).body("Hi", stream_options={"include_usage": True})
    through = router.post(body)
    direct = httpx.post(router.decode[0].url + "/v1/chat/completions", json=body).content
    assert len(through.chunks) > 5
    assert normal(through.raw) == normal(direct)


def normal(stream: bytes) -> bytes:
    """A stream less what differs between two requests."""
    first = json.loads(stream.partition(b"\n")[0].removeprefix(b"data: "))
    for name in ("id", "created"):
        stream = stream.replace(json.dumps(first[name]).encode(), b"0")
    return stream


@both
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_network_reads_may_split_events_anywhere(
    router: Router, conversation: str, size: int
) -> None:
    router.decode[0].write_size = size
    chat = Chat(router, conversation)
    text = "a long enough answer \U0001f600 with kv_transfer_params in it"
    router.decode[0].scripts.append(Script(content=text))
    router.decode[0].faults.append(None)
    answer = chat.say("Hello")
    assert answer.message["content"] == text
    assert chat.say("Again").outcome == "hit"


@both
def test_events_arrive_as_they_are_made(router: Router, conversation: str) -> None:
    router.decode[0].hold_after = 3
    body = Chat(router, conversation).body("Hello")
    with router.http.stream("POST", router.url + "/v1/chat/completions", json=body) as answer:
        assert answer.headers["x-pd-reuse"] == "miss"
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert not router.decode[0].released.is_set()
        router.decode[0].released.set()
        assert list(lines)[-2] == "data: [DONE]"


def test_a_whole_answer_is_passed_on(router: Router, conversation: str) -> None:
    router.decode[0].scripts.append(Script(content="Grüße \U0001f600"))
    answer = Chat(router, conversation, stream=False).say("Hi")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert answer.message["content"] == "Grüße \U0001f600"


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"vllm_xargs": {"kv_transfer_params": "boom", "other": 1}},
        {"ec_transfer_params": {"x": 1}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_clients_transfer_parameters_are_stripped(
    router: Router, conversation: str, fields: dict[str, Any]
) -> None:
    stripped = router.metric("pd_router_client_kv_params_stripped_total")
    chat = Chat(router, conversation)
    assert chat.say("Hello", **fields).outcome == "miss"
    assert router.metric("pd_router_client_kv_params_stripped_total") == stripped + 1
    # The shared checks see to it that the engines got none of it; the rest stays.
    sent = router.decode[0].requests[-1]
    assert "ec_transfer_params" not in sent
    assert sent.get("vllm_xargs", {"other": 1}) == {"other": 1}
    plain = Chat(router, conversation, stream=False)
    router.post(plain.body("Hello", n=2, **fields))
    assert "kv_transfer_params" not in json.dumps(router.decode[0].requests[-1])


def test_only_known_headers_reach_an_engine(router: Router, conversation: str) -> None:
    body = Chat(router, conversation).body("Hello")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    router.post(body, traceparent=trace, x_request_id="r1", x_data_parallel_rank="7", cookie="a=b")
    for engine in router.engines:
        headers = {name.lower(): value for name, value in engine.request_headers[-1].items()}
        assert (headers["traceparent"], headers["x-request-id"]) == (trace, "r1")
        assert headers.keys().isdisjoint({"x-data-parallel-rank", "cookie"})


@pytest.mark.parametrize("name", ["a,b", "HB:x", "x" * 65, "with space"])
def test_a_request_id_that_would_break_a_lease_reaches_no_engine(
    router: Router, conversation: str, name: str
) -> None:
    router.post(Chat(router, conversation).body("Hello", request_id=name), x_request_id=name)
    for engine in router.engines:
        headers = {name.lower() for name in engine.request_headers[-1]}
        assert "x-request-id" not in headers
        assert "request_id" not in engine.requests[-1]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "fake"}',
        b'{"messages": {}}',
        b'{"messages": [], "x": NaN}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [], "x": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"\xff\xfe\x00",
        b'{"messages": [' + b"9" * 5000 + b"]}",
    ],
)
def test_a_body_that_is_no_turn_is_a_400(router: Router, body: bytes) -> None:
    answer = router.post(body)
    if b"[" * 900 in body and len(body) < 10_000:
        assert answer.status in (200, 400)  # Deep, and valid where the interpreter copes.
        return
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["code"] == 400
    assert router.decode[0].requests == []


@pytest.mark.parametrize("messages", [[1], ["x", None], [{"role": 1, "content": {}}], [{}]])
def test_odd_messages_are_the_engines_to_judge(
    router: Router, conversation: str, messages: list[Any]
) -> None:
    router.prefill[0].faults.append(422)
    body = {"messages": messages, "conversation_id": conversation}
    assert router.post(body).status == 422


def test_a_completion_needs_a_prompt(router: Router) -> None:
    assert router.post({"model": "fake"}, "/v1/completions").status == 400


def test_lone_surrogates_pass(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation, stream=False)
    body = chat.body("x")
    raw = json.dumps(body).replace('"x"', '"\\ud83d"').encode()
    router.decode[0].faults.append(429)
    assert router.post(raw).status == 429
    assert router.decode[0].requests[-1]["messages"][0]["content"] == "\ud83d"


def test_a_body_that_is_too_large_is_a_413(router: Router, conversation: str) -> None:
    answer = router.post(Chat(router, conversation).body("x" * 1_000_001))
    assert (answer.status, answer.json["error"]["code"]) == (413, 413)


def test_other_paths_and_methods_are_refused_in_json(router: Router) -> None:
    for path in ("/", "/v1/audio/speech", "/v1/chat/completions/x"):
        answer = router.post({}, path)
        assert (answer.status, answer.json["error"]["code"]) == (404, 404)
    refused = router.get("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["code"] == 405


def test_models_are_merged_by_id(router: Router) -> None:
    router.decode[0].model = "other"
    models = router.get("/v1/models").json()
    assert sorted(model["id"] for model in models["data"]) == ["fake", "other"]
    router.decode[0].model = "fake"
    assert len(router.get("/v1/models").json()["data"]) == 1


def test_health_names_the_legs(router: Router) -> None:
    health = router.get("/health")
    assert health.status_code == 200
    assert health.json() == {
        "status": "ok",
        "legs": [
            {"name": "prefill-0", "role": "prefill", "healthy": True, "reason": None},
            {"name": "decode-0", "role": "decode", "healthy": True, "reason": None},
        ],
    }
    router.prefill[0].healthy = False
    health = router.get("/health")
    assert health.status_code == 503
    assert health.json()["legs"][0]["reason"] == "/health answered 503"


def test_metrics_carry_the_names_of_telemetry(router: Router, conversation: str) -> None:
    Chat(router, conversation).say("Hello")
    text = router.get("/metrics").text
    router_metrics = [m for m in telemetry.METRICS if m.name.startswith("pd_router_")]
    assert [m.name for m in router_metrics if f"# HELP {m.name} {m.text}" not in text] == []
    for outcome in Outcome:
        assert f'{telemetry.ROUTER_TURNS.name}{{outcome="{outcome.value}",route=' in text
    assert router.metric(telemetry.ROUTER_TTFT.name + "_count", outcome="miss") > 0
    assert router.metric(telemetry.ROUTER_PREFILL.name + "_count", leg="prefill-0") > 0
    assert router.metric(telemetry.ROUTER_INFO.name, reuse_proof="connector") == 1
    assert router.metric(telemetry.ROUTER_REQUESTS.name, path="/v1/chat/completions") > 0


def test_counters_are_there_before_the_first_turn(start_router: StartRouter) -> None:
    text = start_router(prefills=2).get("/metrics").text
    for name in ("prefill-0", "prefill-1"):
        assert f'pd_router_handles_sent_total{{leg="{name}"}} 0.0' in text
    assert 'pd_router_handles_dropped_total{reason="leg_restarted"} 0.0' in text
    assert "pd_router_handles_stored_total 0.0" in text


def test_a_turn_is_one_line_of_the_log(start_router: StartRouter) -> None:
    router = start_router()
    chat = Chat(router, "a-secret-name", key="Bearer secret-key")
    chat.say("a secret text")
    chat.say("a secret text")
    wait_for(lambda: router.log.count(" turn ") == 2, "two lines")
    lines = [line for line in router.log.splitlines() if " turn " in line]
    assert "secret" not in router.log
    router.check_secrets(router.log.encode())
    for line, outcome, cache in zip(lines, ("miss", "hit"), ("MISS", "HIT"), strict=True):
        for part in ("router=router-0", "prefill=prefill-0", "decode=decode-0"):
            assert part in line
        assert f" outcome={outcome} " in line
        assert " Prefill done in " in line
        assert f"ms cache {cache} ttft_ms=" in line


def test_legs_and_router_may_have_ipv6_addresses(tmp_path: Any) -> None:
    engines = [FakeEngine("prefill"), FakeEngine("decode")]
    for engine in engines:
        engine.host = "::1"
        engine.omit_handles = True
        try:
            engine.start()
        except OSError:
            pytest.skip("no IPv6 here")
    router = launch(tmp_path, engines[:1], engines[1:], host="::1")
    try:
        assert Chat(router, "c").say("Hello").status == 200
        assert router.get("/health").status_code == 200
    finally:
        router.stop()
        for engine in engines:
            engine.stop()


GOOD: dict[str, Any] = {
    "name": "r",
    "host": "127.0.0.1",
    "port": 8000,
    "prefill": {"p": {"url": "http://127.0.0.1:1"}},
    "decode": {"d": {"url": "http://[::1]:2"}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"port": 0}, "Expected `int` >= 1 - at `$.port`"),
        ({"port": "http"}, "Expected `int`, got `str` - at `$.port`"),
        ({"prefill": {}}, "length >= 1 - at `$.prefill`"),
        ({"prefill": {"p": {}}}, "missing required field `url` - at `$.prefill"),
        ({"prefill": {"p": {"url": "ftp://h:1"}}}, "p: 'ftp://h:1' is not an http URL"),
        ({"prefill": {"p": {"url": "http://h:99999"}}}, "is not an http URL"),
        ({"prefill": {"d": {"url": "http://h:1"}}}, "leg name used twice: d"),
        ({"handle_ttl": 480}, "handle_ttl 480 must be below decode_ttl 480"),
        ({"handle_ttl": -1}, "Expected `float` > 0.0 - at `$.handle_ttl`"),
        ({"connector": "mine"}, "Invalid enum value 'mine' - at `$.connector`"),
        ({"bidirectional": "yes"}, "Expected `bool`, got `str` - at `$.bidirectional`"),
        ({"max_handles": 0}, "Expected `int` >= 1 - at `$.max_handles`"),
        ({"conversation_headers": ["a b"]}, "'a b' is not a header name"),
        ({"tenant_header": "a b"}, "'a b' is not a header name"),
        ({"connector": "stock", "reuse_proof": "connector"}, "needs the pdctl connector"),
        ({"otlp_endpoint": "localhost:4317"}, "otlp_endpoint: 'localhost:4317' is not an http"),
        ({"log_level": "loud"}, "Invalid enum value 'loud'"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"decode": None}, "Expected `object`, got `null` - at `$.decode`"),
    ],
)
def test_a_bad_config_file_is_one_clear_line(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "router.json"
    config.write_text(json.dumps(GOOD))
    assert main(["--config", str(config), "--check"]) == 0
    config.write_text(json.dumps(GOOD | change))
    assert main(["--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pd_router: {config}: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("text", [None, "", "{", "[]", "\xff"])
def test_a_config_file_that_is_none_is_one_clear_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "router.json"
    if text is not None:
        config.write_text(text, encoding="latin-1")
    assert main(["--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pd_router: {config}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --config"),
        (["--config", "x", "--port", "1"], "unrecognized arguments: --port 1"),
    ],
)
def test_a_bad_command_line_is_one_clear_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error == f"pd_router: {message}\n"


def test_a_port_in_use_is_one_clear_line(router: Router, tmp_path: Path) -> None:
    port = int(router.url.rsplit(":", 1)[-1])
    config = tmp_path / "router.json"
    config.write_text(json.dumps(GOOD | {"port": port}))
    command = [sys.executable, "-m", "pd_router", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"pd_router: cannot listen on 127.0.0.1:{port}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_large_history_passes(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("x" * 200_000)
    assert chat.say("Again").outcome == "hit"
