"""Streams reach the client as the engine sent them, as it sent them, and end as they ended."""

import json
from threading import Event

from tests.conformance.rig import Rig
from tests.fake_engine import Script


def test_a_chunk_is_passed_on_before_the_next_one_is_there(rig: Rig) -> None:
    for engine in rig.decode:
        engine.hold_after = 3
    chat = rig.chat()
    with rig.client.stream(
        "POST", f"{rig.url}/v1/chat/completions", json=chat.body(), headers=chat.headers
    ) as response:
        pieces = response.iter_bytes()
        seen = b""
        while seen.count(b"data: ") < 2:
            seen += next(pieces)
        for engine in rig.decode:
            engine.released.set()
        seen += b"".join(pieces)
    assert seen.rstrip().endswith(b"[DONE]")


def test_usage_and_tool_calls_arrive(rig: Rig) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    for engine in rig.decode:
        engine.scripts.append(Script(tool_calls=[call], finish_reason="tool_calls"))
    answer = rig.chat().say(stream_options={"include_usage": True})
    chunks = [json.loads(event) for event in answer.events if event != b"[DONE]"]
    assert chunks[-1]["usage"]["prompt_tokens"] > 0
    parts = [p for c in chunks for ch in c["choices"] for p in ch["delta"].get("tool_calls") or []]
    assert "".join(part["function"].get("arguments") or "" for part in parts) == '{"at":1}'


def test_a_broken_stream_does_not_end_as_a_whole_one(rig: Rig) -> None:
    for engine in rig.decode:
        engine.faults.append("die")
    try:
        answer = rig.chat().say()
    except Exception:
        return
    finally:
        rig.reset()
    assert b'"error"' in answer.raw or not answer.raw.rstrip().endswith(b"[DONE]")


def test_a_client_that_leaves_ends_its_request_on_decode(rig: Rig) -> None:
    for engine in rig.decode:
        engine.hold_after = 3
    chat = rig.chat()
    with rig.client.stream(
        "POST", f"{rig.url}/v1/chat/completions", json=chat.body(), headers=chat.headers
    ) as response:
        pieces = response.iter_bytes()
        next(pieces)
        del pieces
    rig.until(lambda: _let_go(rig), "decode's request is aborted")


def _let_go(rig: Rig) -> bool:
    """A fake engine notices on its next write that nobody listens."""
    for engine in rig.decode:
        released, engine.released = engine.released, Event()
        released.set()
    return sum(engine.aborted for engine in rig.decode) > 0
