"""Cutting streams into events, at every byte and for every line end."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import (
    CHAT_CHOICE_KEYS,
    CHUNK_KEYS,
    LAST_CHAT_CHOICE_KEYS,
    LAST_CHUNK_KEYS,
    TEXT_CHOICE_KEYS,
    Script,
    stream_events,
)
from pd_router.answer import Answer
from pd_router.relay import StreamRelay
from pd_router.sse import EventTooLarge, Splitter, data_of

HANDLE = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.1"}


class _Engine:
    model = "fake"


def chat_stream() -> bytes:
    script = Script(content='He said "kv_transfer_params": \U0001f600', reasoning="hm")
    body = {"messages": [], "stream_options": {"include_usage": True}}
    events = stream_events(_Engine(), body, script, HANDLE, {"prompt_tokens": 1})  # type: ignore[arg-type]
    return b"".join(events)


def relay(chunks: list[bytes]) -> tuple[bytes, list[Answer], bool]:
    answers: list[Answer] = []
    stream = StreamRelay(1 << 20, [], answers.append)
    out = b"".join(stream.feed(chunk) for chunk in chunks)
    return out, answers, stream.done


def without_handle(stream: bytes) -> bytes:
    return stream.replace(
        b',"kv_transfer_params":' + json.dumps(HANDLE, separators=(",", ":")).encode(), b""
    )


@pytest.mark.parametrize("body", [{"messages": []}, {"prompt": "x"}], ids=["chat", "text"])
def test_the_fake_engine_keeps_to_its_description(body: dict[str, Any]) -> None:
    events = stream_events(_Engine(), body, Script(content="answer"), HANDLE, {})  # type: ignore[arg-type]
    chunks = [json.loads(event[6:]) for event in events[:-1] if event.startswith(b"data: ")]
    assert [chunk.keys() for chunk in chunks[:-1]] == [CHUNK_KEYS] * (len(chunks) - 1)
    assert chunks[-1].keys() == LAST_CHUNK_KEYS
    first, last = CHAT_CHOICE_KEYS, LAST_CHAT_CHOICE_KEYS
    if "prompt" in body:
        first = last = TEXT_CHOICE_KEYS
    assert chunks[0]["choices"][0].keys() == first
    assert chunks[-1]["choices"][0].keys() == last


def test_a_split_at_any_byte_changes_nothing() -> None:
    stream = chat_stream()
    expected = without_handle(stream)
    assert expected != stream
    for cut in range(len(stream) + 1):
        out, answers, done = relay([stream[:cut], stream[cut:]])
        assert out == expected
        assert (len(answers), done) == (1, True)
        assert answers[0].handle == HANDLE
        assert answers[0].text == 'He said "kv_transfer_params": \U0001f600'


def test_single_bytes_change_nothing() -> None:
    stream = chat_stream()
    out, answers, _ = relay([stream[i : i + 1] for i in range(len(stream))])
    assert out == without_handle(stream)
    assert len(answers) == 1


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_any_line_end_ends_a_line(end: bytes) -> None:
    stream = chat_stream().replace(b"\n", end)
    out, answers, done = relay([stream[i : i + 1] for i in range(len(stream))])
    assert (len(answers), done) == (1, True)
    assert b"10.0.0.1" not in out
    texts = [data_of(event) for event in Splitter(1 << 20).feed(out + end)]
    assert [text for text in texts if text][-1] == b"[DONE]"


@given(
    st.lists(st.sampled_from([b"data: a", b":c", b"\n", b"\r\n", b"\r", b"\n\n", b"x"])),
    st.lists(st.integers(0, 60)),
)
def test_splitting_loses_no_byte(parts: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(parts)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    splitter = Splitter(1 << 20)
    events: list[bytes] = []
    for start, end in itertools.pairwise(places):
        events += splitter.feed(stream[start:end])
    assert stream.startswith(b"".join(events))


def test_a_handle_that_is_never_finished_is_never_passed_on() -> None:
    out, answers, done = relay([b'data: {"kv_transfer_params": {"remote_host": "10.0.0.1"'])
    assert (out, answers, done) == (b"", [], False)
    out, _, _ = relay([b'data: {"kv_transfer_params": {"remote_host": "10.0.0.1"\n\n'])
    assert b"10.0.0.1" not in out


def test_an_event_has_a_largest_size() -> None:
    with pytest.raises(EventTooLarge):
        Splitter(100).feed(b"data: " + b"x" * 200)
