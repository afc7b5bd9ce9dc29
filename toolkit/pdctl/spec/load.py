"""YAML file -> Spec, or every fault in it at file:line:column."""

import copy
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from pdctl.spec.model import Spec
from pdctl.spec.rules import STAND_INS, Broken, broken_rules

Where = tuple[str | int, ...]

_MAX_BYTES = 1 << 20
_MAX_NESTING = 64


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a spec. ``line`` and ``column`` count from 1."""

    file: str
    line: int
    column: int
    message: str
    level: str = "error"

    def __str__(self) -> str:
        prefix = "" if self.level == "error" else f"{self.level}: "
        return f"{self.file}:{self.line}:{self.column}: {prefix}{self.message}"


class SpecError(Exception):
    """The spec cannot be used. ``faults`` holds every fault found, in file order."""

    def __init__(self, faults: list[Fault]):
        self.faults = sorted(faults, key=lambda f: (f.line, f.column, f.message))
        super().__init__("\n".join(map(str, self.faults)))


@dataclass(frozen=True)
class Loaded:
    spec: Spec
    path: Path
    warnings: list[Fault]


class _Marks:
    """Where each key and value stands in the file."""

    def __init__(self, file: str, root: yaml.Node):
        self.file = file
        self._at: dict[Where, tuple[yaml.Mark, yaml.Mark]] = {(): (root.start_mark,) * 2}
        self.duplicates: list[Fault] = []
        self._walk(root, (), frozenset())

    def fault(self, where: Where, message: str, level: str = "error", key: bool = False) -> Fault:
        """A fault at the value of ``where`` (or its key), or at its nearest ancestor."""
        while where not in self._at:
            where, key = where[:-1], True
        mark = self._at[where][0 if key else 1]
        return Fault(self.file, mark.line + 1, mark.column + 1, message, level)

    def _walk(self, node: yaml.Node, where: Where, above: frozenset[int]) -> None:
        if id(node) in above or len(above) > _MAX_NESTING:
            return
        above |= {id(node)}
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                at = (*where, index)
                self._at[at] = (item.start_mark, item.start_mark)
                self._walk(item, at, above)
        elif isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                at = (*where, key.value)
                if key.value in seen:
                    message = f"{_dotted(at)} is given twice (first in line {seen[key.value]})"
                    mark = key.start_mark
                    self.duplicates.append(
                        Fault(self.file, mark.line + 1, mark.column + 1, message)
                    )
                seen.setdefault(key.value, key.start_mark.line + 1)
                self._at[at] = (key.start_mark, value.start_mark)
                self._walk(value, at, above)


def load(path: str | Path) -> Loaded:
    """Read and check a spec file.

    Raises:
        SpecError: it cannot be read, is not YAML, or breaks a rule; all faults at once.
    """
    path = Path(path)
    file = str(path)
    root, data = _parse(file, _read(path))
    marks = _Marks(file, root)
    faults = list(marks.duplicates)
    spec, broken = _validate(data)
    for rule in broken:
        faults.append(marks.fault(rule.where, rule.message, rule.level, rule.at_key))
    errors = [fault for fault in faults if fault.level == "error"]
    if errors or spec is None:
        raise SpecError(errors)
    return Loaded(spec, path, [fault for fault in faults if fault.level != "error"])


def _read(path: Path) -> str:
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise SpecError([Fault(file, 1, 1, "is larger than 1 MiB; a spec is a small file")])
        return raw.decode("utf-8")
    except OSError as error:
        raise SpecError([Fault(file, 1, 1, f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise SpecError([Fault(file, line, column, "is not UTF-8 text")]) from None


def _parse(file: str, text: str) -> tuple[yaml.Node, dict[str, Any]]:
    loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if _nesting(text) > _MAX_NESTING:
            raise SpecError([Fault(file, 1, 1, f"is nested deeper than {_MAX_NESTING} levels")])
        loader = loader_class(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise SpecError([Fault(file, 1, 1, "is empty; examples/laptop.yaml is a start")])
            data = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        message = error.problem or error.context or "cannot be parsed"
        raise SpecError([Fault(file, line, column, f"is not valid YAML: {message}")]) from None
    except yaml.YAMLError as error:
        message = str(error).splitlines()[0]
        raise SpecError([Fault(file, 1, 1, f"is not valid YAML: {message}")]) from None
    except (ValueError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        # PyYAML's constructors let malformed scalars (dates, huge integers) through as these.
        raise SpecError([Fault(file, 1, 1, f"holds a value YAML cannot read: {error}")]) from None
    if not isinstance(data, dict):
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        kind = type(data).__name__
        raise SpecError(
            [Fault(file, line, column, f"must be a mapping of keys to values, not a {kind}")]
        )
    return node, data


def _nesting(text: str) -> int:
    """Deepest flow or block nesting, from the token stream: the composer is recursive."""
    depth = deepest = 0
    loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for event in yaml.parse(text, Loader=loader_class):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            deepest = max(deepest, depth)
            if deepest > _MAX_NESTING:
                break
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return deepest


def _validate(data: dict[str, Any]) -> tuple[Spec | None, list[Broken]]:
    """The spec if it is whole, and everything wrong with it.

    Rules between fields are checked also when single fields are wrong: defaults or stand-ins
    take the place of the wrong ones, and rules about those are not reported.
    """
    broken: list[Broken] = []
    replaced: set[Where] = set()
    rest: Any = data
    while True:
        try:
            spec = Spec.model_validate(rest)
            break
        except ValidationError as error:
            found = [(_where(e["loc"], rest), dict(e)) for e in error.errors(include_url=False)]
        new = {where for where, _ in found} - replaced
        if not replaced:
            broken += [_broken(where, error) for where, error in found]
        if not new or not all(
            where[-1] in STAND_INS for where, error in found if error["type"] == "missing"
        ):
            return None, broken
        replaced |= new
        rest = _replaced(rest, new)
    for rule in broken_rules(spec):
        if not any(rule.where[: len(where)] == where for where in replaced):
            broken.append(rule)
    return (spec if not replaced else None), broken


def _where(loc: tuple[str | int, ...], data: Any) -> Where:
    """pydantic's location without its union tags, as a path that exists in the data."""
    where: list[str | int] = []
    for part in loc:
        if isinstance(data, dict):
            if part == "[key]":
                continue
            where.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            where.append(part)
            data = data[part] if part < len(data) else None
        else:
            break
    return tuple(where)


def _replaced(data: Any, wrong: set[Where]) -> Any:
    data = copy.deepcopy(data)
    # Later list items first, so that earlier indexes stay true.
    for count, where in enumerate(sorted(wrong, key=lambda w: tuple(map(str, w)), reverse=True)):
        parent: Any = data
        for part in where[:-1]:
            parent = parent[part]
        last = where[-1]
        if isinstance(parent, dict):
            parent.pop(last, None)
            if last in STAND_INS:
                stand_in = STAND_INS[str(last)]
                parent[last] = stand_in + count if isinstance(stand_in, int) else stand_in
        elif isinstance(parent, list) and isinstance(last, int):
            del parent[last]
    return data


def _dotted(where: Where) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _broken(where: Where, error: dict[str, Any]) -> Broken:
    name = _dotted(where)
    kind = error["type"]
    if kind == "extra_forbidden":
        parent = _dotted(where[:-1])
        place = f" in {parent}" if parent else ""
        known = _known_keys(where[:-1])
        close = difflib.get_close_matches(str(where[-1]), known, 1, 0.6)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
        return Broken(where, f"unknown key {str(where[-1])!r}{place}{hint}", at_key=True)
    if kind == "missing":
        return Broken(where, f"{name} is missing", at_key=True)
    message = error["msg"].removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        message = f"{error['input']!r} does not have the form {error['ctx']['pattern']}"
    elif kind == "model_type":
        message = "should be a mapping of keys to values"
    elif kind.endswith("_type") or kind in (
        "literal_error",
        "greater_than",
        "greater_than_equal",
        "less_than_equal",
    ):
        message = f"{message}, not {_short(error['input'])}"
    message = message[0].lower() + message[1:]
    return Broken(where, f"{name}: {message}" if name else message)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | None | bool) else ""
    return text if text and len(text) <= 60 else f"a {type(value).__name__}"


def _known_keys(where: Where) -> list[str]:
    section: type[BaseModel] | None = Spec
    for part in where:
        if section is None:
            return []
        if isinstance(part, int):
            continue
        field = section.model_fields.get(str(part))
        section = _model_in(field.annotation) if field else None
    return list(section.model_fields) if section else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
