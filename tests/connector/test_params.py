"""kv_transfer_params that would harm vLLM are told from those that would not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.params import ParamsError, check_params

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
BLOCKS: dict[str, Any] = {
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "decode-0",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 300,
    "remote_blocks_expiry_time": 12.5,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "transfer_mode": "pull",
}
READ = {"do_remote_decode": False, "do_remote_prefill": True}


@pytest.mark.parametrize(
    "params",
    [
        ASK,
        {"do_remote_decode": False},
        {"do_remote_decode": True},
        {**ASK, **dict.fromkeys(BLOCKS)},
        {**ASK, **BLOCKS},
        {**READ, **BLOCKS},
        {**ASK, **BLOCKS, "remote_block_ids": [[0, 0, 5], []]},
        {**ASK, **BLOCKS, "remote_blocks_expiry_time": None, "remote_num_tokens": None},
        {**ASK, "remote_block_ids": []},
        {**READ, **BLOCKS, "remote_prefill_cached_tokens": 5, "prompt_token_ids": [1, 2]},
        {**ASK, "pd_previous": "cmpl-0", "pd_anything": [1]},
    ],
)
def test_what_engines_and_routers_send_is_taken(params: dict[str, Any]) -> None:
    check_params(params)


def test_a_field_of_this_vllms_own_handles_is_known() -> None:
    with pytest.raises(ParamsError, match="unknown key 'remote_moon'"):
        check_params({**ASK, "remote_moon": 1})
    check_params({**ASK, "remote_moon": 1}, frozenset({"remote_moon"}))
    check_params({**ASK, "remote_moon": 1}, None)
    with pytest.raises(ParamsError, match="unknown key '_remote_blocks_processed'"):
        check_params({**ASK, "_remote_blocks_processed": True}, None)


@pytest.mark.parametrize(
    ("params", "reason", "text"),
    [
        ("boom", "not_an_object", "must be an object"),
        ([1], "not_an_object", "must be an object"),
        ({"foo": 1}, "unknown_key", "unknown key 'foo'"),
        ({**ASK, "_remote_blocks_processed": True}, "unknown_key", "_remote_blocks_processed"),
        ({"remote_port": 1}, "missing", "do_remote_prefill or do_remote_decode"),
        ({"do_remote_prefill": True}, "missing", "remote_block_ids, which do_remote_prefill"),
        ({**READ, **BLOCKS, "remote_block_ids": [[]]}, "missing", "remote_block_ids"),
        ({**READ, **BLOCKS, "remote_port": None}, "missing", "remote_port"),
        ({**ASK, **BLOCKS, "remote_host": None}, "missing", "remote_host"),
        ({**BLOCKS, "do_remote_prefill": True, "do_remote_decode": True}, "both", "both"),
        ({"do_remote_prefill": 1}, "wrong_type", "do_remote_prefill must be true or false"),
        ({**ASK, "remote_num_tokens": "boom"}, "wrong_type", "a whole number, not str"),
        ({**ASK, "remote_num_tokens": True}, "wrong_type", "a whole number, not bool"),
        ({**ASK, "remote_num_tokens": 1.5}, "wrong_type", "a whole number, not float"),
        ({**ASK, "remote_num_tokens": -1}, "out_of_range", "0 to 2147483647"),
        ({**ASK, "remote_port": 0}, "out_of_range", "1 to 65535"),
        ({**ASK, "remote_port": "5600"}, "wrong_type", "remote_port"),
        ({**ASK, "remote_host": ["a"]}, "wrong_type", "a string, not list"),
        ({**ASK, "remote_host": ""}, "out_of_range", "1 to 253 printable"),
        ({**ASK, "remote_host": "a\nb"}, "out_of_range", "printable"),
        ({**ASK, "remote_engine_id": 5}, "wrong_type", "a string, not int"),
        ({**ASK, "remote_block_ids": 5}, "wrong_type", "a list per cache group"),
        ({**ASK, "remote_block_ids": [1, 2]}, "wrong_type", "remote_block_ids[0]"),
        ({**ASK, "remote_block_ids": [["1"]]}, "wrong_type", "remote_block_ids[0][0]"),
        ({**ASK, "remote_block_ids": [[-1]]}, "out_of_range", "remote_block_ids[0][0]"),
        ({**ASK, "remote_block_ids": [[2**31]]}, "out_of_range", "remote_block_ids[0][0]"),
        ({**ASK, "remote_block_ids": [[4, 4]]}, "out_of_range", "names a block twice"),
        ({**ASK, "remote_blocks_expiry_time": "soon"}, "wrong_type", "a number, not str"),
        ({**ASK, "remote_blocks_expiry_time": float("nan")}, "out_of_range", "finite"),
        ({**ASK, "tp_size": 0}, "out_of_range", "tp_size"),
        ({**ASK, "tp_size": {}}, "wrong_type", "tp_size"),
        ({**ASK, "prompt_token_ids": ["a"]}, "wrong_type", "prompt_token_ids[0]"),
        ({**ASK, "transfer_mode": 1}, "wrong_type", "transfer_mode"),
    ],
)
def test_what_harms_is_refused_with_what_is_wrong(params: object, reason: str, text: str) -> None:
    with pytest.raises(ParamsError) as error:
        check_params(params)
    assert error.value.reason == reason
    assert text in str(error.value)
    assert "\n" not in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.sampled_from([*ASK, *BLOCKS, "foo"]), JSON))
def test_anything_is_taken_or_refused_and_nothing_else(params: dict[str, Any]) -> None:
    try:
        check_params(params)
    except ParamsError:
        return
    if params.get("do_remote_prefill"):
        assert any(params["remote_block_ids"])
        assert isinstance(params["remote_host"], str)
