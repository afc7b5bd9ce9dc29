"""Settings in use, from a command line, YAML, JSON, KEY=VALUE lines, or a mix of these."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdctl.doctor.evidence.small import load_yaml

LONGEST = 1 << 18
MOST_VALUES = 5_000
DEEPEST = 30
"""Limits: characters, settings and levels that are read of a configuration."""

_ASSIGNMENT = re.compile(r"^(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$")


@dataclass(frozen=True)
class Config:
    """``values`` are all settings by dotted path, in the order they stand there; command line
    flags are in there without their dashes, with ``_`` for ``-`` (``--no-x`` is ``x: False``)."""

    text: str
    values: tuple[tuple[str, Any], ...]

    def all(self, key: str) -> list[tuple[str, Any]]:
        """Paths and values of a setting wherever it stands; ``key`` is a path or the end of one."""
        wanted = _plain(key)
        return [
            (path, value)
            for path, value in self.values
            if _plain(path) == wanted or _plain(path).endswith(f".{wanted}")
        ]

    def get(self, key: str, default: Any = None) -> Any:
        """The last value of a setting (the one that counts on a command line)."""
        found = self.all(key)
        return found[-1][1] if found else default

    def __contains__(self, key: str) -> bool:
        return bool(self.all(key))


def parse_config(text: str) -> Config | None:
    """None when the text holds nothing."""
    if not text.strip():
        return None
    return Config(text, tuple(itertools.islice(_values(text[:LONGEST]), MOST_VALUES)))


def _plain(path: str) -> str:
    return path.replace("-", "_").lower()


def _values(text: str) -> Iterator[tuple[str, Any]]:
    document = _document(text)
    if document is not None:
        yield from _flat("", document)
        return
    # A mix: read what can be read line by line, words of a command line across lines.
    words: list[str] = []
    for line in text.splitlines():
        assignment = _ASSIGNMENT.match(line.strip())
        single = _document(line)
        if assignment:
            yield assignment[1], _scalar(_unquoted(assignment[2]))
        elif isinstance(single, dict) and "--" not in line:
            yield from _flat("", single)
        else:
            role = re.match(r"^\s*([\w -]+?):\s+(.*)$", line)
            if role:
                yield from _flags(role[1].strip(), _words(role[2]))
            else:
                words += _words(line)
    yield from _flags("", words)


def _document(text: str) -> Any:
    """The mapping that the text is, None when it is none (or a command line in disguise)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = load_yaml(text)
        except ValueError:
            return None
    if not isinstance(value, dict):
        return None
    if any(isinstance(v, str) and v.lstrip().startswith("--") for v in value.values()):
        return None
    return value


def _words(line: str) -> list[str]:
    line = line.rstrip().removesuffix("\\")
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def _flags(prefix: str, words: list[str]) -> Iterator[tuple[str, Any]]:
    dot = f"{prefix}." if prefix else ""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--") or len(word) < 3:
            if match := _ASSIGNMENT.match(word):
                yield f"{dot}{match[1]}", _scalar(match[2])
            if word == "serve" and words[at - 2 : at - 1] == ["vllm"]:
                yield from ((f"{dot}model", model) for model in _positional(words[at : at + 1]))
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and at < len(words) and not words[at].startswith("--"):
            value, equals = words[at], "="
            at += 1
        name = name.replace("-", "_")
        if not equals:
            off = name.startswith("no_")
            yield f"{dot}{name.removeprefix('no_')}", not off
            continue
        parsed = _document(value) if value.lstrip().startswith("{") else None
        if parsed is None:
            yield f"{dot}{name}", _scalar(value)
        else:
            yield f"{dot}{name}", value
            yield from _flat(f"{dot}{name}", parsed)


def _positional(words: list[str]) -> list[str]:
    """The model of ``vllm serve MODEL``."""
    return [word for word in words if not word.startswith("-") and "$" not in word]


def _flat(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner, depth + 1)
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        yield prefix, value
        for index, inner in enumerate(value):
            yield from _flat(f"{prefix}[{index}]", inner, depth + 1)
    else:
        yield prefix, value


def _unquoted(text: str) -> str:
    words = _words(text)
    return words[0] if len(words) == 1 else text.strip()


def _scalar(text: str) -> Any:
    try:
        value = load_yaml(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text
