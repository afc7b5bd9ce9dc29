"""pydantic's errors in the words of the spec: what, and what to do."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdctl.spec.faults import Broken, Where, dotted, shown
from pdctl.spec.model import FORMS, Spec
from pdctl.spec.units import format_number

_KINDS = {
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of names to values",
    "list_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def broken_field(where: Where, error: dict[str, Any]) -> Broken:
    """What pydantic found at one place."""
    kind, name = error["type"], dotted(where)
    if kind == "extra_forbidden":
        return Broken(where, _unknown_key(where), at_key=True)
    if kind == "missing":
        about = _description(where)
        return Broken(where, f"{name} is missing{f': {about}' if about else ''}", at_key=True)
    at_key = error["loc"][-1:] == ("[key]",)
    return Broken(where, f"{name}: {_problem(kind, error)}{_way_out(where, error)}", at_key=at_key)


def _way_out(where: Where, error: dict[str, Any]) -> str:
    nothing = error["input"] is None or error["type"] == "string_too_short"
    field = _field(where)
    if not nothing or (field and field.is_required()):
        return ""
    return "; give it a value, or leave the key out"


def _problem(kind: str, error: dict[str, Any]) -> str:
    value, context = error["input"], error.get("ctx", {})
    if value is None:
        return "has no value"
    if kind in _KINDS:
        hint = ""
        if kind == "string_type" and not isinstance(value, dict | list):
            hint = "; put it in quotes"
        elif kind in ("int_type", "float_type") and isinstance(value, str):
            hint = _number_hint(value.strip())
        return f"should be {_KINDS[kind]}, not {shown(value)}{hint}"
    if kind in _LIMITS:
        limit, words = _LIMITS[kind]
        return f"should be {words} {format_number(context[limit])}, not {shown(value)}"
    if kind == "literal_error":
        expected = context["expected"].replace("True", "true").replace("False", "false")
        return f"should be {expected}, not {shown(value)}"
    if kind == "string_pattern_mismatch":
        return f"should be {FORMS[context['pattern']]}, not {shown(value)}"
    if kind == "string_too_short":
        return "is empty"
    if kind == "too_short":
        return f"needs at least {context['min_length']} entry"
    if kind == "too_long":
        return f"has more than {context['max_length']} entries"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _number_hint(text: str) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return ""
    return "; leave out the leading 0" if re.match("0[0-9]", text) else "; leave the quotes out"


def _unknown_key(where: Where) -> str:
    key, parent = str(where[-1]), dotted(where[:-1])
    place = f" in {parent}" if parent else ""
    known = _known_keys(where[:-1])
    homes = [home for home, keys in _sections(Spec) if key in keys]
    close = difflib.get_close_matches(key, known, 1, 0.6)
    if homes and len(homes) <= 4:
        hint = f"it belongs in {' or '.join(home or 'the top level' for home in homes)}"
    elif close:
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = f"known: {', '.join(known)}"
    return f"unknown key {shown(key)}{place}; {hint}"


def _known_keys(where: Where) -> list[str]:
    section = _section(where)
    return list(section.model_fields) if section else []


def _description(where: Where) -> str:
    field = _field(where)
    text = field.description or "" if field else ""
    return text[:1].lower() + text[1:].rstrip(".")


def _field(where: Where) -> FieldInfo | None:
    section = _section(where[:-1])
    return section.model_fields.get(str(where[-1])) if section else None


def _section(where: Where) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Spec
    for part in where:
        if section is None:
            return None
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part)
        section = _model_in(field.annotation) if field else None
    return section


def _sections(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every section's dotted name and its keys."""
    yield path, set(section.model_fields)
    for key, field in section.model_fields.items():
        inner = _model_in(field.annotation)
        if inner:
            yield from _sections(inner, f"{path}.{key}" if path else key)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
