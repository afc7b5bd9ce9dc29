"""``kv_transfer_params`` in few bytes, for as long as a handle waits.

Nearly all of a handle is the ids of its blocks. They are kept as differences, byte plane by
byte plane: those of a young engine, which follow each other, then shrink to nothing, and
those of an aged one to the two or three bytes that each of them says. The rest is JSON,
compressed with the words that every handle has.
"""

import sys
import zlib
from array import array
from collections.abc import Mapping
from itertools import accumulate, chain
from operator import sub
from typing import Any

from pd_connector import contract
from pd_router import jsonbytes

_WORDS = (
    b'"do_remote_decode":false,"do_remote_prefill":true,"remote_num_tokens":'
    b'"pd_sig":"chatcmpl-0123456789abcdef","pd_tokens":{"v":1,"n":"digest":"'
    b'{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[],'
    b'"remote_engine_id":"decode-0-","remote_request_id":"chatcmpl-","remote_host":"10.0.0.1",'
    b'"remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":'
    b',"remote_blocks_expiry_time":,"transfer_mode":"pull"'
)
"""Changing it makes what is held in a shared store unreadable; then :data:`_FORM` changes too."""
_FORM = 1
_PLAIN, _IDS = 0, 1
_HEAD = 6
_WIDEST = 4
"""Bytes of an id."""
_BARE = -zlib.MAX_WBITS
"""Deflate without zlib's head and check sum."""
_SMALL = -12
"""... with a window of 4 KB: to make ready the usual 256 KB takes longer than the packing."""


def pack(params: Mapping[str, Any]) -> bytes:
    """``params`` in a form that :func:`unpack` reads."""
    groups = params.get(contract.REMOTE_BLOCK_IDS)
    if not isinstance(groups, list) or (planes := _planes(groups)) is None:
        return bytes([_FORM, _PLAIN, 0, 0, 0, 0]) + _compressed(jsonbytes.dump(dict(params)))
    lengths = {**params, contract.REMOTE_BLOCK_IDS: [len(group) for group in groups]}
    width, ids = planes
    rest = _compressed(jsonbytes.dump(lengths))
    return bytes([_FORM, _IDS + width]) + len(rest).to_bytes(4, "big") + rest + ids


def unpack(packed: bytes) -> bytes:
    """The JSON of the packed params; every field has the value and the place that it had.

    Raises :class:`ValueError` for what :func:`pack` has not made.
    """
    if len(packed) < _HEAD or packed[0] != _FORM:
        raise ValueError("not a packed handle of this version")
    try:
        if packed[1] == _PLAIN:
            return _expanded(packed[_HEAD:])
        end = _HEAD + int.from_bytes(packed[2:_HEAD], "big")
        params = jsonbytes.load(_expanded(packed[_HEAD:end]))
        ids = iter(_from_planes(packed[1] - _IDS, packed[end:]))
        lengths = params[contract.REMOTE_BLOCK_IDS]
        params[contract.REMOTE_BLOCK_IDS] = [[next(ids) for _ in range(n)] for n in lengths]
    except (zlib.error, ValueError, KeyError, TypeError, StopIteration, RuntimeError) as error:
        raise ValueError(f"not a packed handle: {error}") from None
    return jsonbytes.dump(params)


def _planes(groups: list[Any]) -> tuple[int, bytes] | None:
    """The ids of all groups, and how many bytes each takes; None if they are no ids.

    There may be thousands, so that nothing here goes through them one by one in Python.
    """
    if not all(type(group) is list for group in groups):
        return None
    ids = list(chain.from_iterable(groups))
    if not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        return None
    width = max((max(ids, default=0).bit_length() + 7) // 8, 1)
    if width > _WIDEST:
        return None
    steps = array("q", map(sub, ids, [0, *ids]))
    if sys.byteorder == "big":
        steps.byteswap()
    raw = steps.tobytes()
    # A step back is there in two's complement, of which the low bytes are enough.
    return width, _deflated(b"".join(raw[place::8] for place in range(width)), 1)


def _from_planes(width: int, planes: bytes) -> list[int]:
    raw = zlib.decompress(planes, _BARE)
    count = len(raw) // width
    spread = bytearray(4 * count)
    for place in range(width):
        spread[place::4] = raw[place * count : (place + 1) * count]
    steps = array("I", bytes(spread))
    if sys.byteorder == "big":
        steps.byteswap()
    most = (1 << 8 * width) - 1
    return list(accumulate(steps, lambda before, step: (before + step) & most))


def _deflated(raw: bytes, level: int, words: bytes = b"") -> bytes:
    wbits, memory = (_SMALL, 5) if len(raw) + len(words) < 1 << -_SMALL else (_BARE, 8)
    packer = zlib.compressobj(level, wbits=wbits, memLevel=memory, zdict=words)
    return packer.compress(raw) + packer.flush()


def _compressed(raw: bytes) -> bytes:
    return _deflated(raw, 6, _WORDS)


def _expanded(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=_BARE, zdict=_WORDS)
    raw = unpacker.decompress(packed)
    if not unpacker.eof:
        raise zlib.error("it was cut off")
    return raw
