"""Parsers of a bundle's small files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

_VARIABLE = re.compile(r"^(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$")
_VERSION = re.compile(r"^\s*([A-Za-z][\w.+-]*?)\s*(?:==|@|:|=|\s)\s*(\S.*?)\s*$")


_MOST_BRACKETS = 5_000
_MOST_PARTS = 50_000


def load_yaml(text: str) -> Any:
    """YAML from anybody.

    Raises:
        ValueError: it is none, or nested beyond reason.
    """
    if text.count("[") + text.count("{") > _MOST_BRACKETS:
        raise ValueError("nested beyond reason")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error).partition("\n")[0] or type(error).__name__) from None
    if "*" in text and not _is_small(value):
        raise ValueError("its aliases unfold without end")
    return value


def _is_small(value: Any) -> bool:
    """Whether a value has few parts, counting what is shared each time it is met."""
    rest, count = [value], 0
    while rest and count < _MOST_PARTS:
        count += 1
        match rest.pop():
            case dict() as mapping:
                rest += mapping.values()
            case list() as items:
                rest += items
    return not rest


def parse_env(text: str) -> dict[str, str]:
    """KEY=VALUE lines; others, comments too, are left out."""
    matches = (_VARIABLE.match(line.strip()) for line in text.splitlines())
    return {match[1]: match[2].strip() for match in matches if match}


def parse_versions(text: str) -> dict[str, str] | None:
    """``NAME==VERSION`` or ``name version`` lines; names in lower case with ``-``."""
    matches = (
        _VERSION.match(line) for line in text.splitlines() if not line.lstrip().startswith("#")
    )
    found = {match[1].lower().replace("_", "-"): match[2] for match in matches if match}
    return found or None


def parse_settings(text: str) -> dict[str, Any] | None:
    """What a settings endpoint answered; None when it is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, output) of every ``$ command`` in a text."""
    line, output = "", ""
    for each in text.splitlines(keepends=True):
        if each.startswith("$ "):
            if line or output.strip():
                yield line, output
            line, output = each[2:].strip(), ""
        else:
            output += each
    if line or output.strip():
        yield line, output
