"""``kv_transfer_params`` as they arrive with a request, checked before vLLM acts on them.

vLLM takes them as they are: some end the engine, some leave a request waiting for ever, some pin
blocks that nobody frees.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pd_connector.contract import (
    DO_REMOTE_DECODE,
    DO_REMOTE_PREFILL,
    KV_TRANSFER_PARAMS,
    REMOTE_BLOCK_IDS,
    REMOTE_ENGINE_ID,
    REMOTE_EXPIRY,
    REMOTE_HOST,
    REMOTE_NUM_TOKENS,
    REMOTE_PORT,
    REMOTE_REQUEST_ID,
)

Reason = Literal["not_an_object", "unknown_key", "wrong_type", "out_of_range", "missing", "both"]
"""What is wrong with them; ``both``: a prompt is computed here or elsewhere, not both."""

OWN_PREFIX = "pd_"
"""Our own fields begin with it; they are checked where they are read."""

_MOST = 2**31 - 1
_ADDRESS = (REMOTE_ENGINE_ID, REMOTE_REQUEST_ID, REMOTE_HOST, REMOTE_PORT)


class ParamsError(ValueError):
    """The parameters are refused. ``str()`` is one line for the sender."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def check_params(params: object, also_known: frozenset[str] | None = frozenset()) -> None:
    """Raise ParamsError when vLLM must not see these parameters.

    ``also_known``: fields that the running vLLM puts into its own handles; None when it is not
    known what it puts there, so that any field is taken.
    """
    if not isinstance(params, Mapping):
        raise ParamsError("not_an_object", f"{KV_TRANSFER_PARAMS} must be an object")
    for key, value in params.items():
        check = _FIELDS.get(key)
        if check is not None:
            if value is not None:
                check(key, value)
        elif not isinstance(key, str) or not _is_known(key, also_known):
            raise ParamsError("unknown_key", f"{KV_TRANSFER_PARAMS} has an unknown key {key!r:.80}")
    _check_together(params)


def _is_known(key: str, also_known: frozenset[str] | None) -> bool:
    if key.startswith("_"):
        # vLLM's scheduler keeps its own state among them.
        return False
    return key.startswith(OWN_PREFIX) or also_known is None or key in also_known


def _check_together(params: Mapping[str, Any]) -> None:
    reads, prefills = params.get(DO_REMOTE_PREFILL), params.get(DO_REMOTE_DECODE)
    if reads is None and prefills is None:
        _missing(f"{DO_REMOTE_PREFILL} or {DO_REMOTE_DECODE}")
    if reads and prefills:
        raise ParamsError(
            "both", f"{KV_TRANSFER_PARAMS} has both {DO_REMOTE_PREFILL} and {DO_REMOTE_DECODE}"
        )
    has_blocks = any(params.get(REMOTE_BLOCK_IDS) or ())
    if reads and not has_blocks:
        _missing(f"{REMOTE_BLOCK_IDS}, which {DO_REMOTE_PREFILL} needs")
    if has_blocks:
        for field in _ADDRESS:
            if params.get(field) is None:
                _missing(f"{field}, which {REMOTE_BLOCK_IDS} needs")


def _missing(what: str) -> None:
    raise ParamsError("missing", f"{KV_TRANSFER_PARAMS} lacks {what}")


def _wrong_type(key: str, value: object, wanted: str) -> None:
    raise ParamsError(
        "wrong_type", f"{KV_TRANSFER_PARAMS}.{key} must be {wanted}, not {type(value).__name__}"
    )


def _flag(key: str, value: object) -> None:
    if not isinstance(value, bool):
        _wrong_type(key, value, "true or false")


def _text(longest: int) -> Callable[[str, object], None]:
    def check(key: str, value: object) -> None:
        if not isinstance(value, str):
            _wrong_type(key, value, "a string")
        elif not 0 < len(value) <= longest or not value.isprintable():
            raise ParamsError(
                "out_of_range",
                f"{KV_TRANSFER_PARAMS}.{key} must have 1 to {longest} printable characters",
            )

    return check


def _whole(least: int, most: int = _MOST) -> Callable[[str, object], None]:
    def check(key: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            _wrong_type(key, value, "a whole number")
        elif not least <= value <= most:
            raise ParamsError(
                "out_of_range", f"{KV_TRANSFER_PARAMS}.{key} must be {least} to {most}"
            )

    return check


def _number(key: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        _wrong_type(key, value, "a number")
    elif not math.isfinite(value):
        raise ParamsError("out_of_range", f"{KV_TRANSFER_PARAMS}.{key} must be finite")


def _block_ids(key: str, value: object) -> None:
    if not isinstance(value, (list, tuple)):
        _wrong_type(key, value, "a list per cache group")
        return
    block_id = _whole(0)
    for number, group in enumerate(value):
        if not isinstance(group, (list, tuple)):
            _wrong_type(f"{key}[{number}]", group, "a list of block numbers")
            return
        for at, block in enumerate(group):
            block_id(f"{key}[{number}][{at}]", block)
        if len(used := [block for block in group if block]) != len(set(used)):
            # Block 0 stands for "no block" and may stand several times.
            raise ParamsError(
                "out_of_range", f"{KV_TRANSFER_PARAMS}.{key}[{number}] names a block twice"
            )


def _token_ids(key: str, value: object) -> None:
    if not isinstance(value, (list, tuple)):
        _wrong_type(key, value, "a list of token ids")
        return
    token_id = _whole(0)
    for at, token in enumerate(value):
        token_id(f"{key}[{at}]", token)


_FIELDS: dict[str, Callable[[str, object], None]] = {
    DO_REMOTE_PREFILL: _flag,
    DO_REMOTE_DECODE: _flag,
    REMOTE_BLOCK_IDS: _block_ids,
    REMOTE_ENGINE_ID: _text(512),
    REMOTE_REQUEST_ID: _text(1024),
    REMOTE_HOST: _text(253),
    REMOTE_PORT: _whole(1, 65535),
    REMOTE_NUM_TOKENS: _whole(0),
    REMOTE_EXPIRY: _number,
    "tp_size": _whole(1, 4096),
    "dcp_size": _whole(1, 4096),
    "pp_size": _whole(1, 4096),
    "remote_block_size": _whole(1),
    "transfer_mode": _text(64),
    # vLLM 0.32 puts the first into prefill's answer and takes the second from routers.
    "remote_prefill_cached_tokens": _whole(0),
    "prompt_token_ids": _token_ids,
}
