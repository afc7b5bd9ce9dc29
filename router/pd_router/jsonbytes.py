"""JSON as bytes, the way bodies travel."""

import json
from typing import Any


def dump(value: Any) -> bytes:
    """Compact UTF-8 JSON, keys in their given order."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        # A lone surrogate is valid as a JSON escape and nothing else.
        return json.dumps(value, separators=(",", ":")).encode()


def load(data: bytes) -> Any:
    """The value of ``data``.

    Raises :class:`ValueError` on anything that is not JSON, ``NaN`` and nesting
    beyond the interpreter's depth included.
    """
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
