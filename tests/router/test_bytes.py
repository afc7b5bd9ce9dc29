"""Bytes of answers: handles cut out of them and nothing else, whatever their shape."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router import jsonbytes
from pd_router.relay import StreamRelay, body_without_handle

NAME = "kv_transfer_params"
HANDLE = {"remote_host": "10.9.8.7", "remote_block_ids": [[1, 2], []], "text": 'a "quoted\\" } ] ,'}

words = st.one_of(
    st.text(max_size=8),
    st.sampled_from([NAME, f'"{NAME}":', "\\", '\\"', "{", "}", "[", ",", "data: ", "\n\n"]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=12,
)
objects = st.dictionaries(words, values, max_size=4)


def planted(value: Any, seed: int) -> Any:
    """``value`` with handles in some of its objects, at some of their places."""
    if isinstance(value, list):
        return [planted(item, seed + n) for n, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    members = [(key, planted(item, seed + n)) for n, (key, item) in enumerate(value.items())]
    if seed % 2 == 0:
        members.insert(seed % (len(members) + 1), (NAME, HANDLE if seed % 4 else "text"))
    return dict(members)


def bare(value: Any) -> Any:
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if key != NAME}
    return value


FORMATS = [
    {"separators": (",", ":")},
    {"separators": (", ", ": ")},
    {"indent": 1},
    {"separators": (" ,\t", "\n: "), "ensure_ascii": False},
]


@given(objects, st.integers(0, 99), st.sampled_from(FORMATS))
def test_a_handle_is_cut_out_at_any_place(
    value: dict[str, Any], seed: int, form: dict[str, Any]
) -> None:
    raw = json.dumps(planted(value, seed), **form).encode()
    cut = jsonbytes.without_member(raw, NAME)
    assert json.loads(cut) == bare(value)
    if json.loads(raw) == bare(value):
        assert cut == raw
    assert b"10.9.8.7" not in cut


@pytest.mark.parametrize(
    ("raw", "left"),
    [
        (b'{"a":1,"kv_transfer_params":{"x":[1]},"b":2}', b'{"a":1,"b":2}'),
        (b'{"a": 1, "kv_transfer_params": null}', b'{"a": 1}'),
        (b'{"kv_transfer_params":"}\\"","b":2}', b'{"b":2}'),
        (b'{"kv_transfer_params":-1.5e3}', b"{}"),
        (b'{"a":"say \\"kv_transfer_params\\": {}"}', b'{"a":"say \\"kv_transfer_params\\": {}"}'),
        (b'{"a":["kv_transfer_params"]}', b'{"a":["kv_transfer_params"]}'),
        (b'{"a":"\\\\","kv_transfer_params":{}}', b'{"a":"\\\\"}'),
        (b'{"r":{"kv_transfer_params":{},"x":1.0},"y":1e2}', b'{"r":{"x":1.0},"y":1e2}'),
        (b'{"kv_transfer_params":1,"kv_transfer_params":{"b":2}}', b"{}"),
    ],
)
def test_nothing_but_the_handle_is_cut(raw: bytes, left: bytes) -> None:
    assert jsonbytes.without_member(raw, NAME) == left
    assert body_without_handle(raw, json.loads(raw)) == left


@given(st.binary(max_size=60))
def test_cutting_never_fails(raw: bytes) -> None:
    jsonbytes.without_member(b'{"kv_transfer_params":' + raw, NAME)


@given(
    st.lists(st.sampled_from(["text", "handle", "comment", "crlf", "named", "error", "junk"])),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.booleans(),
)
def test_a_stream_of_any_events_in_any_pieces(
    kinds: list[str], sizes: list[int], notes: bool
) -> None:
    events = {
        "text": (b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n',) * 2,
        "handle": (
            b'data: {"a":1.0,"kv_transfer_params":{"remote_host":"10.9.8.7"}}\n\n',
            b'data: {"a":1.0}\n\n',
        ),
        "comment": (b": ping kv_transfer_params\n\n",) * 2,
        "crlf": (b'data: {"b" : 2}\r\n\r\n',) * 2,
        "named": (
            b'event: done\ndata: {"response":{"kv_transfer_params":{"h":1},"x":2}}\n\n',
            b'event: done\ndata: {"response":{"x":2}}\n\n',
        ),
        "error": (b'data: {"error":{"message":"no","code":500}}\n\n',) * 2,
        "junk": (b"data: {not json\n\n",) * 2,
    }
    stream = b"".join(events[kind][0] for kind in kinds)
    expected = b"".join(events[kind][1] for kind in kinds)
    relay = StreamRelay(1 << 20, [], (lambda answer: None) if notes else None)
    out, place, turn = b"", 0, 0
    while place < len(stream):
        size = sizes[turn % len(sizes)]
        out += relay.feed(stream[place : place + size])
        place, turn = place + size, turn + 1
    assert out == expected


@given(st.binary(max_size=200), st.integers(1, 50))
def test_a_stream_of_any_bytes_never_fails(raw: bytes, size: int) -> None:
    relay = StreamRelay(1 << 20, [], lambda answer: None)
    out = b"".join(relay.feed(raw[n : n + size]) for n in range(0, len(raw), size))
    assert raw.startswith(out) or b"error" in raw or b"_transfer_params" in raw
