"""Durations and sizes as people write them.

Durations: ``480``, ``480s``, ``8m``, ``1h30m``, ``250ms``; a bare number is seconds.
Sizes: ``4096``, ``512MiB``, ``4Gi``, ``1.5GB``; a bare number is bytes, ``KB`` and ``K`` are 1000,
``KiB`` and ``Ki`` are 1024.
"""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from pdctl.spec.faults import shown

GIB = 2**30

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "b": 1}
for _power, _unit in enumerate("kmgt", 1):
    _BYTES |= {_unit: 1000**_power, f"{_unit}b": 1000**_power}
    _BYTES |= {f"{_unit}i": 1024**_power, f"{_unit}ib": 1024**_power}

_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_BARE_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([a-z]*)")
_LARGEST_SIZE = 2**60


def parse_duration(value: Any) -> float:
    """Seconds of a duration.

    Raises:
        ValueError: it is neither a number nor a duration such as ``480s`` or ``8m``.
    """
    if _is_number(value):
        return float(value)
    text = _text(value)
    if _BARE_NUMBER.fullmatch(text):
        return float(text)
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{shown(value)} is not a duration; write it like 480s, 8m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def parse_size(value: Any) -> int:
    """Bytes of a size.

    Raises:
        ValueError: it is neither a number nor a size such as ``512MiB``.
    """
    if _is_number(value):
        return int(value)
    match = _SIZE.fullmatch(_text(value))
    if not match or match[2] not in _BYTES:
        raise ValueError(f"{shown(value)} is not a size; write it like 512MiB or 4GiB")
    return int(float(match[1]) * _BYTES[match[2]])


def _is_number(value: Any) -> bool:
    """Whether it is a number of a size that float and int can hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= _LARGEST_SIZE


def _text(value: Any) -> str:
    return value.replace(" ", "").lower() if isinstance(value, str) else ""


def format_duration(seconds: float) -> str:
    """The shortest exact form, for messages: ``480s``, ``1.5s``."""
    return f"{format_number(seconds)}s"


def format_number(number: float) -> str:
    """``480`` of 480.0, ``1.5``; exact, never in powers of ten."""
    return str(int(number)) if number == int(number) else str(number)


_NUMBER_SCHEMA = {"type": "number", "exclusiveMinimum": 0}
_DURATION_SCHEMA = {
    "anyOf": [
        _NUMBER_SCHEMA,
        {"type": "string", "pattern": r"^ *([0-9]+(\.[0-9]+)? *([mM]?[sS]|[mMhHdD])? *)+$"},
    ],
    "description": "A duration: 480s, 8m, 1h30m; a bare number is seconds.",
}
_SIZE_SCHEMA = {
    "anyOf": [
        _NUMBER_SCHEMA,
        {"type": "string", "pattern": r"^ *[0-9]+(\.[0-9]+)? *([kKmMgGtT][iI]?)?[bB]? *$"},
    ],
    "description": "A size: 512MiB, 4GiB; a bare number is bytes.",
}

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0, le=31_536_000, allow_inf_nan=False),
    WithJsonSchema(_DURATION_SCHEMA),
]
"""Seconds, more than 0, at most a year."""

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(gt=0, le=_LARGEST_SIZE),
    WithJsonSchema(_SIZE_SCHEMA),
]
"""Bytes, more than 0, at most an EiB."""
