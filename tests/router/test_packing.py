"""Handles are held in few bytes and come back as they were."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.packing import pack, unpack

ids = st.lists(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1)), max_size=20), max_size=3
)
odd = st.one_of(
    st.none(),
    st.integers(),
    st.text(),
    st.lists(st.integers()),
    st.lists(st.lists(st.text())),
    st.lists(st.lists(st.one_of(st.integers(), st.booleans()))),
)


@given(
    st.one_of(ids, odd),
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(), st.integers(), st.floats(-9, 9))),
    st.booleans(),
)
def test_what_is_packed_comes_back(blocks: Any, others: dict[str, Any], first: bool) -> None:
    own = {"remote_block_ids": blocks}
    params = own | others if first else others | own
    back = json.loads(unpack(pack(params)))
    assert list(back.items()) == list(params.items())


@pytest.mark.parametrize("raw", [b"", b"\x02" * 9, b"\x01\x05\x00\x00\x00\x01x", b"\x01\x00junk!"])
def test_what_was_never_packed_is_an_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a packed handle"):
        unpack(raw)


def test_blocks_that_follow_each_other_take_no_room() -> None:
    small = len(pack({"remote_block_ids": [[7]]}))
    assert len(pack({"remote_block_ids": [list(range(5000, 6500))]})) < small + 60
