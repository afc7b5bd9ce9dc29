"""YAML file -> Spec, or every fault in it at file:line:column."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pdctl.spec.faults import Broken, Fault, SpecError, Where, in_file_order
from pdctl.spec.messages import broken_field
from pdctl.spec.model import Spec
from pdctl.spec.rules import broken_rules
from pdctl.spec.source import read
from pdctl.spec.stand_ins import stand_in


@dataclass(frozen=True)
class Loaded:
    spec: Spec
    path: Path
    warnings: list[Fault]


def load(path: str | Path, bidirectional: bool | None = None) -> Loaded:
    """Read and check a spec file.

    Args:
        bidirectional: what ``kv_transfer.bidirectional`` is to be instead of what the file says.

    Raises:
        SpecError: it cannot be read, is not YAML, or breaks a rule; all faults at once.
    """
    path = Path(path)
    source = read(path)
    if bidirectional is not None:
        transfer = source.data.setdefault("kv_transfer", {})
        if isinstance(transfer, dict):
            transfer["bidirectional"] = bidirectional
    faults = list(source.faults)
    spec, broken = _validate(source.data)
    for rule in broken:
        faults.append(source.marks.fault(rule.where, rule.message, rule.level, rule.at_key))
    errors = [fault for fault in faults if fault.level == "error"]
    if errors or spec is None:
        raise SpecError(faults)
    return Loaded(spec, path, in_file_order(faults))


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
        if not replaced:
            broken = [broken_field(where, error) for where, error in found]
        if {where for where, _ in found} <= replaced:
            return None, broken
        replaced |= {where for where, _ in found}
        rest = _replaced(rest, dict(found))
    for rule in broken_rules(spec):
        if not any(_within(where, replaced) for where in (rule.where, *rule.also)):
            broken.append(rule)
    return (spec if not replaced else None), broken


def _within(where: Where, replaced: set[Where]) -> bool:
    return any(where[:length] in replaced for length in range(1, len(where) + 1))


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


def _replaced(data: Any, found: dict[Where, dict[str, Any]]) -> Any:
    """The data with stand-ins, or nothing, where it is wrong."""
    for count, (where, error) in enumerate(found.items()):
        if not any(where[:length] in found for length in range(len(where))):
            unknown = error["type"] == "extra_forbidden"
            data = _with(data, where, None if unknown else stand_in(where, count))
    return data


def _with(data: Any, where: Where, value: Any) -> Any:
    """A copy with ``value`` at one path, or without that key when it is None; what an alias shares
    with other paths stays as it is there."""
    data = data.copy()
    first, *rest = where
    if rest:
        data[first] = _with(data[first], tuple(rest), value)
    elif value is not None:
        data[first] = value
    else:
        data.pop(first, None)
    return data
