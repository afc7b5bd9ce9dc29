"""YAML text -> plain data, and where each value stands in the file."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pdctl.spec.faults import Fault, SpecError, Where, dotted, shown

_MAX_BYTES = 1 << 20
_MAX_NESTING = 64
_MAX_VALUES = 100_000
"""Aliases let a small file hold exponentially many values."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_OCTAL = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*")
_NOT_TEXT = frozenset(_TAG + tag for tag in ("int", "float", "bool", "timestamp", "merge", "value"))
_AS_WRITTEN = ("env", "extra_args")
"""Below these keys every value is text as it stands in the file: YAML would read ``1.10``,
``0x1f`` and ``on`` as something else."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """A parsed file. ``faults`` are those of the text itself."""

    data: dict[str, Any]
    faults: list[Fault]
    marks: "Marks"


class Marks:
    """Where each key and value stands in a file."""

    def __init__(self, file: str, root: yaml.Node):
        self.file = file
        self._at: dict[Where, tuple[yaml.Mark, yaml.Mark]] = {(): (root.start_mark,) * 2}
        self._visited = 0

    def count(self) -> None:
        self._visited += 1
        if self._visited > _MAX_VALUES:
            message = f"holds more than {_MAX_VALUES} values; a spec is a small file"
            raise SpecError([Fault(self.file, 1, 1, message)])

    def add(self, where: Where, key: yaml.Mark, value: yaml.Mark) -> None:
        self._at.setdefault(where, (key, value))

    def fault(self, where: Where, message: str, level: str = "error", key: bool = False) -> Fault:
        """A fault at the value of ``where`` (or its key), or at its nearest ancestor."""
        while where not in self._at:
            where, key = where[:-1], True
        return fault_at(self.file, self._at[where][0 if key else 1], message, level)


def fault_at(file: str, mark: yaml.Mark | None, message: str, level: str = "error") -> Fault:
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    return Fault(file, line, column, message, level)


def read(path: Path) -> Source:
    """Parse a spec file.

    Raises:
        SpecError: it cannot be read, or is not YAML with a mapping at its top.
    """
    file = str(path)
    root = _compose(file, _text(path))
    marks = Marks(file, root)
    faults = list(_walk(marks, root, _Place()))
    data = _construct(file, root)
    if not isinstance(data, dict):
        kind = {"list": "list", "str": "text"}.get(type(data).__name__, "single value")
        message = f"must be a mapping of keys to values (name: ...), not a {kind}"
        raise SpecError([fault_at(file, root.start_mark, message.replace("a text", "text"))])
    return Source(data, faults, marks)


def _text(path: Path) -> str:
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SpecError([Fault(file, 1, 1, f"cannot be read: {error.strerror}")]) from None
    except ValueError as error:
        raise SpecError([Fault(file, 1, 1, f"cannot be read: {error}")]) from None
    if len(raw) > _MAX_BYTES:
        raise SpecError([Fault(file, 1, 1, "is larger than 1 MiB; a spec is a small file")])
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line, column = _line_column(raw[: error.start].decode("utf-8"))
        raise SpecError(
            [Fault(file, line, column, "is not UTF-8 text; save it as UTF-8")]
        ) from None
    if control := _CONTROL.search(text):
        line, column = _line_column(text[: control.start()])
        message = f"holds the control character {control[0]!r}; remove it"
        raise SpecError([Fault(file, line, column, message)])
    return text


def _line_column(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _compose(file: str, text: str) -> yaml.Node:
    try:
        too_deep = _deeper_than_allowed(text)
        if too_deep:
            message = f"is nested deeper than {_MAX_NESTING} levels"
            raise SpecError([fault_at(file, too_deep, message)])
        loader = _LOADER(text)
        try:
            node: yaml.Node | None = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise SpecError([_not_yaml(file, text, error)]) from None
    except (yaml.YAMLError, ValueError) as error:
        # Characters YAML does not allow; percent-escapes in tags that are no text.
        message = f"is not valid YAML: {str(error).splitlines()[0]}"
        raise SpecError([Fault(file, 1, 1, message)]) from None
    if node is None:
        raise SpecError([Fault(file, 1, 1, "is empty; examples/laptop.yaml is a start")])
    return node


def _deeper_than_allowed(text: str) -> Any:
    """The mark where nesting goes too far, from the event stream: the composer is recursive."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_NESTING:
                return event.start_mark
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return None


def _not_yaml(file: str, text: str, error: yaml.MarkedYAMLError) -> Fault:
    mark = error.problem_mark or error.context_mark
    problem = ", ".join(filter(None, (_context(error), error.problem))) or "cannot be parsed"
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        problem = "a tab in the indentation; YAML indents with spaces"
    elif "mapping values are not allowed" in problem:
        problem += "; put text that holds ': ' in quotes, and check the indentation"
    elif "cannot start any token" in problem:
        problem += "; put text that starts with one of @ ` % in quotes"
    elif "another document" in problem:
        problem = "a second document ('---'); one file holds one spec"
    elif "unhashable key" in problem:
        problem = "a key is one word, not a list or a mapping"
    elif "could not determine a constructor" in problem:
        problem = f"unknown tag {problem.split()[-1]}; put text that starts with '!' in quotes"
    elif "undefined alias" in problem:
        problem += "; put text that starts with '*' in quotes"
    return fault_at(file, mark, f"is not valid YAML: {problem}")


def _context(error: yaml.MarkedYAMLError) -> str | None:
    start, end = error.context_mark, error.problem_mark
    if not start or not end or start.line == end.line:
        return error.context
    return f"{error.context} that starts in line {start.line + 1}"


@dataclass(frozen=True)
class _Place:
    """Where a walk stands: the path, the nodes above, and how values there are to be read."""

    where: Where = ()
    above: frozenset[int] = frozenset()
    as_written: bool = False
    inherited: bool = False

    def below(self, part: str | int, as_written: bool) -> "_Place":
        return _Place((*self.where, part), self.above, as_written)


def _walk(marks: Marks, node: yaml.Node, place: _Place) -> Iterator[Fault]:
    """Notes where everything stands, turns keys and ``_AS_WRITTEN`` values into text, and yields
    what is wrong with the text itself: what YAML reads differently from what people mean."""
    marks.count()
    if id(node) in place.above:
        return
    place = replace(place, above=place.above | {id(node)})
    if isinstance(node, yaml.ScalarNode):
        yield from _scalar_faults(marks, node, place)
    elif isinstance(node, yaml.SequenceNode):
        for index in range(len(node.value)):
            if place.as_written:
                node.value[index] = _text_node(node.value[index], _NOT_TEXT)
            item = node.value[index]
            below = place.below(index, place.as_written)
            marks.add(below.where, item.start_mark, item.start_mark)
            yield from _walk(marks, item, below)
    elif isinstance(node, yaml.MappingNode):
        yield from _walk_mapping(marks, node, place)


def _walk_mapping(marks: Marks, node: yaml.MappingNode, place: _Place) -> Iterator[Fault]:
    first: dict[str, int] = {}
    merged: list[yaml.Node] = []
    for index, (raw_key, raw_value) in enumerate(node.value):
        if raw_key.tag == _TAG + "merge":
            merged += raw_value.value if isinstance(raw_value, yaml.SequenceNode) else [raw_value]
            continue
        if not isinstance(raw_key, yaml.ScalarNode):
            continue
        key = _text_node(raw_key, _NOT_TEXT | {_TAG + "null"})
        as_written = place.as_written or raw_key.value in _AS_WRITTEN
        value = _text_node(raw_value, _NOT_TEXT) if as_written else raw_value
        node.value[index] = (key, value)
        below = place.below(raw_key.value, as_written)
        if raw_key.value in first and not place.inherited:
            line = first[raw_key.value]
            message = f"{dotted(below.where)} is given twice (first in line {line})"
            yield fault_at(marks.file, key.start_mark, message)
        if _NO_TEXT.search(raw_key.value):
            yield fault_at(marks.file, key.start_mark, f"{raw_key.value!r} is no key")
        first.setdefault(raw_key.value, key.start_mark.line + 1)
        marks.add(below.where, key.start_mark, value.start_mark)
        yield from _walk(marks, value, below)
    for mapping in merged:
        if isinstance(mapping, yaml.MappingNode):
            yield from _walk(marks, mapping, replace(place, inherited=True))


def _scalar_faults(marks: Marks, node: yaml.ScalarNode, place: _Place) -> Iterator[Fault]:
    name, text = dotted(place.where), node.value
    if odd := _NO_TEXT.search(text):
        message = f"{name}: holds the character {odd[0]!r}, which no command line can carry"
        yield fault_at(marks.file, node.start_mark, message)
    if node.tag == _TAG + "int" and _OCTAL.fullmatch(text):
        message = f"{name}: YAML reads {shown(text)} as an octal number; leave out the leading 0"
        yield fault_at(marks.file, node.start_mark, message)
    elif node.tag in (_TAG + "int", _TAG + "float") and ":" in text:
        message = f"{name}: YAML reads {shown(text)} as a base-60 number; write it like 480s or 8m"
        yield fault_at(marks.file, node.start_mark, message)


def _text_node(node: yaml.Node, tags: frozenset[str]) -> yaml.Node:
    """A scalar of one of these tags as text; a copy, since an alias may be the same node."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in tags:
        return node
    return yaml.ScalarNode(_TAG + "str", node.value, node.start_mark, node.end_mark, node.style)


def _construct(file: str, root: yaml.Node) -> Any:
    loader = _LOADER("")
    try:
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise SpecError([_not_yaml(file, "", error)]) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # What PyYAML's constructors let through on malformed dates, huge integers and !!tags.
        raise SpecError([_unreadable(file, root, error)]) from None
    finally:
        loader.dispose()


def _unreadable(file: str, root: yaml.Node, error: Exception) -> Fault:
    for node in _scalars(root, set()):
        loader = _LOADER("")
        try:
            loader.construct_object(node)
        except Exception as own:
            reason = str(own).split(";")[0].splitlines()[0]
            if isinstance(own, AttributeError | LookupError):
                reason = f"no {node.tag.removeprefix(_TAG)}"
            message = f"YAML cannot read this value ({reason}); if it is text, put it in quotes"
            return fault_at(file, node.start_mark, message)
        finally:
            loader.dispose()
    return Fault(file, 1, 1, f"holds a value that YAML cannot read: {error}")


def _scalars(node: yaml.Node, seen: set[int]) -> Iterator[yaml.ScalarNode]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(key, seen)
            yield from _scalars(value, seen)
