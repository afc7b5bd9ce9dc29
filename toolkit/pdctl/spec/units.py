"""Durations and sizes as people write them.

Durations: ``480``, ``480s``, ``8m``, ``1h30m``, ``250ms``; a bare number is seconds.
Sizes: ``4096``, ``512MiB``, ``1.5GB``; a bare number is bytes, ``KB`` is 1000, ``KiB`` is 1024.
"""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)}
_BYTES |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}

_DURATION = re.compile(r"(?:\d{1,12}(?:\.\d{1,9})?(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([a-z]*)")


def parse_duration(value: Any) -> float:
    """Seconds of a duration.

    Raises:
        ValueError: it is neither a number nor a duration such as ``480s`` or ``8m``.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    text = value.replace(" ", "").lower() if isinstance(value, str) else ""
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{value!r} is not a duration; write it like 480s, 8m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def parse_size(value: Any) -> int:
    """Bytes of a size.

    Raises:
        ValueError: it is neither a number nor a size such as ``512MiB``.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value)
    text = value.replace(" ", "").lower() if isinstance(value, str) else ""
    match = _SIZE.fullmatch(text)
    if not match or match[2] not in _BYTES:
        raise ValueError(f"{value!r} is not a size; write it like 512MiB or 4GiB")
    return int(float(match[1]) * _BYTES[match[2]])


def format_duration(seconds: float) -> str:
    """The shortest exact form, for messages: ``480s``, ``1.5s``."""
    return f"{seconds:g}s"


_DURATION_SCHEMA = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "string", "pattern": r"^(\d+(\.\d+)?(ms|s|m|h|d))+$"},
    ],
    "description": "A duration: 480s, 8m, 1h30m; a bare number is seconds.",
}
_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "string", "pattern": r"^\d+(\.\d+)?([kKmMgGtT]i?)?[bB]?$"},
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

Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0), WithJsonSchema(_SIZE_SCHEMA)]
"""Bytes, more than 0."""
