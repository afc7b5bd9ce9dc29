"""What is there against what is wanted."""

from collections.abc import Iterator
from typing import Any

_SHOWN = 20
_VALUE_LENGTH = 60
GRAFANAS_OWN = ("id", "version")
"""Of an object itself; parts of it have such keys too, which count."""


def differences(there: Any, wanted: Any) -> tuple[str, ...]:
    """A line for each value that is another than the wanted one, the first of many."""
    lines = list(_walk(there, wanted, ""))
    rest = len(lines) - _SHOWN
    return (*lines[:_SHOWN], *([f"and {rest} more"] if rest > 0 else []))


def _walk(there: Any, wanted: Any, where: str) -> Iterator[str]:
    """Where the wanted value is not what is there; keys that only Grafana has do not count."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        for key in wanted:
            if where or key not in GRAFANAS_OWN:
                yield from _walk(there.get(key), wanted[key], f"{where}.{key}" if where else key)
    elif isinstance(wanted, list) and isinstance(there, list) and len(wanted) == len(there):
        for index, (one, other) in enumerate(zip(there, wanted, strict=True)):
            yield from _walk(one, other, f"{where}[{index}]")
    elif there != wanted:
        yield f"{where}: {_short(there)} -> {_short(wanted)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."
