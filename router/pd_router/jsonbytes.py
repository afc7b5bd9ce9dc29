"""JSON as bytes, the way bodies travel."""

import json
import math
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def dump(value: Any) -> bytes:
    """Compact UTF-8 JSON, keys in their given order.

    Raises :class:`RecursionError` beyond the interpreter's depth.
    """
    try:
        return _encode(value)
    except UnicodeEncodeError:
        # A lone surrogate is valid as a JSON escape and nothing else.
        return json.dumps(value, separators=(",", ":")).encode()


def load(data: bytes) -> Any:
    """The value of ``data``.

    Raises :class:`ValueError` on anything that is not JSON, ``NaN``, numbers beyond a double
    and nesting beyond the interpreter's depth included.
    """
    try:
        return _decode(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except msgspec.DecodeError as error:
        if b"\\u" not in data:
            raise ValueError(str(error)) from None
    return _load_with_surrogates(data)


def _load_with_surrogates(data: bytes) -> Any:
    """The standard library's reading, which takes lone surrogates."""
    try:
        return json.loads(
            data.decode(), parse_constant=_refuse_constant, parse_float=_finite_number
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no double")
    return value
