"""JSON as bytes, the way bodies travel."""

import json
import math
import re
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


def without_member(data: bytes, name: str) -> bytes:
    """Valid JSON less every member called ``name``, at any depth; no other byte changes."""
    key = b'"' + name.encode() + b'"'
    start = data.find(key)
    while start >= 0:
        colon = _COLON.match(data, start + len(key))
        if colon is None or _is_escaped(data, start):
            start = data.find(key, start + len(key))
            continue
        end = _value_end(data, colon.end())
        if comma := _COMMA.match(data, end):
            end = comma.end()
        elif before := _TRAILING_COMMA.search(data[:start]):
            start = before.start()
        data = data[:start] + data[end:]
        start = data.find(key, start)
    return data


_COLON = re.compile(rb"\s*:\s*")
_COMMA = re.compile(rb"\s*,\s*")
_TRAILING_COMMA = re.compile(rb",\s*\Z")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STRING_OR_BRACKET = re.compile(_STRING.pattern + rb"|[\[\]{}]", re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\]}]*")


def _value_end(data: bytes, start: int) -> int:
    """Where the value that begins at ``start`` ends."""
    if data[start : start + 1] not in (b"{", b"["):
        whole = _STRING.match(data, start) or _SCALAR.match(data, start)
        return whole.end() if whole else len(data)
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(data, start):
        mark = token.group()
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return token.end()
    return len(data)


def _is_escaped(data: bytes, place: int) -> bool:
    """Whether the quote at ``place`` belongs to a string around it."""
    backslashes = len(data[:place]) - len(data[:place].rstrip(b"\\"))
    return backslashes % 2 == 1
