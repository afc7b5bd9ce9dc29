"""What the spec says of a leg, after its role and the defaults; paths as the nodes see them."""

import os.path
from pathlib import Path
from typing import TypeVar

from pdctl.spec.model import Leg as LegSpec
from pdctl.spec.model import Role, Spec

T = TypeVar("T")


def whole_path(text: str, base: Path) -> str:
    """A path of the spec as the nodes see it; ``~`` is left to the node's shell."""
    if text.startswith("~"):
        return text
    return os.path.normpath(base.absolute() / text)


def model_of(spec: Spec, base: Path) -> str:
    is_path = spec.model.id.startswith(("/", "./", "../", "~"))
    return whole_path(spec.model.id, base) if is_path else spec.model.id


def served_name(spec: Spec, base: Path) -> str:
    return spec.model.served_name or model_of(spec, base)


def setting(leg: LegSpec, role: Role, name: str, default: T) -> T:
    """The leg's own value, else its role's, else the default."""
    for section in (leg, role):
        if name in section.model_fields_set and getattr(section, name) is not None:
            value: T = getattr(section, name)
            return value
    return default
