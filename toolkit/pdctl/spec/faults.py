"""One thing wrong with a spec, at file:line:column."""

from dataclasses import dataclass
from typing import Any

Where = tuple[str | int, ...]
"""The path of a value: keys and list indexes."""

_LONGEST = 60


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a spec. ``line`` and ``column`` count from 1."""

    file: str
    line: int
    column: int
    message: str
    level: str = "error"

    def __str__(self) -> str:
        """Always one line, and nothing in it that a terminal would act on."""
        prefix = "" if self.level == "error" else f"{self.level}: "
        return _printable(f"{self.file}:{self.line}:{self.column}: {prefix}{self.message}")


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold.

    ``where`` is the path of the value at fault, ``also`` those of the others that the rule is
    about. ``at_key`` points at the key instead of the value.
    """

    where: Where
    message: str
    level: str = "error"
    at_key: bool = False
    also: tuple[Where, ...] = ()


class SpecError(Exception):
    """The spec cannot be used. ``faults`` holds every fault found, in file order."""

    def __init__(self, faults: list[Fault]):
        self.faults = in_file_order(faults)
        super().__init__("\n".join(map(str, self.faults)))


def in_file_order(faults: list[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda f: (f.line, f.column, f.message))


def dotted(where: Where) -> str:
    """``prefill.legs[0].port``"""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{_name(part)}" if text else _name(part)
    return text


def _name(key: str) -> str:
    return _cut(key) if key.strip() else shown(key)


def shown(value: Any) -> str:
    """A value as the file has it, cut when long."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(_cut(value))
    if isinstance(value, int | float):
        # Python refuses to write integers of thousands of digits.
        return "a huge number" if abs(value) > 10**1000 else _cut(str(value))
    return {"dict": "a mapping", "list": "a list"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _printable(text: str) -> str:
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
