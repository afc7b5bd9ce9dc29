"""An answer's text is the same whether its events are read one by one or many at a time."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pd_router.answer import Answer
from pd_router.relay import StreamRelay
from pd_router.sse import Splitter

texts = st.one_of(
    st.sampled_from(
        ["", " token", '"', '"}', "\\", "\\\\", "\n\n", '"content":"', 'data: {"id":"x"', "\u00e9"]
    ),
    st.text(max_size=5),
)


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """Nearly all as a stream's usual ones, some not."""
    kind = draw(st.sampled_from(["usual"] * 8 + ["role", "last", "reasoning", "other id"]))
    delta: dict[str, Any] = {"content": draw(texts)}
    if kind == "role":
        delta = {"role": "assistant"} | delta
    if kind == "reasoning":
        delta["reasoning"] = "hm"
    choice = {"index": 0, "delta": delta, "finish_reason": "stop" if kind == "last" else None}
    chunk: dict[str, Any] = {"id": "b" if kind == "other id" else "a", "choices": [choice]}
    escaped = draw(st.booleans())
    data = json.dumps(chunk, separators=(",", ":"), ensure_ascii=escaped)
    return b"data: " + data.encode(errors="backslashreplace") + b"\n\n"


def read(batches: list[list[bytes]]) -> Answer:
    """As a turn does: some at once, and the last event on its own."""
    answers: list[Answer] = []
    relay = StreamRelay(1 << 20, [], answers.append)
    for batch in batches:
        relay.note_passed(b"".join(batch))
        relay._note_pending()
    relay.feed(b"data: [DONE]\n\n")
    return answers[0]


def told(answer: Answer) -> Any:
    return (
        answer.text,
        answer.role,
        answer.reasoning,
        answer.finish_reason,
        answer.unreadable,
    )


def event(text: bytes) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"' + text + b'"}}]}\n\n'


@given(st.lists(chunks(), min_size=1, max_size=12), st.integers(1, 12))
@example([event(b"a"), event(b"\\ud83d"), event(b"\\ude00")], 3)
@example([event(b"a"), event(b"b\\\\"), event(b"nc")], 3)
def test_read_together_and_one_by_one(events: list[bytes], size: int) -> None:
    together = [events[at : at + size] for at in range(0, len(events), size)]
    assert told(read(together)) == told(read([[each] for each in events]))


@pytest.mark.parametrize(
    "broken", [[b"a\\", b"nb"], [b"a", b'b","role":"x'], [b"a", b"b\nc"], [b"a\xff", b"b"]]
)
def test_what_is_no_json_does_not_become_so_by_its_neighbours(broken: list[bytes]) -> None:
    events = [event(b"first"), *map(event, broken), event(b"last")]
    together, alone = read([events[:1], events[1:]]), read([[each] for each in events])
    assert told(together) == told(alone)


def test_the_text_is_the_answers_own() -> None:
    """Other fields may be called as its own is, and be as empty."""
    head = b'data: {"note":{"content":"%b"},"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
    events = [head % (note, b"") for note in (b"", b"a", b"b", b"")]
    assert read([events[:1], events]).text == ""


def test_usual_events_are_known_again() -> None:
    """Else the test above shows nothing."""
    answer = Answer()
    events = [event(b"one"), event(b"two\\n"), event(b"\xc3\xa9")]
    assert answer.add_events(b"".join(events))
    assert answer.content == ["onetwo\n\u00e9"]
    assert Splitter(100).feed(b"".join(events)) == events
