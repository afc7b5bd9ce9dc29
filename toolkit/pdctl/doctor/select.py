"""Choosing checks by category or code."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pdctl.doctor.model import Category, Check
from pdctl.errors import PdctlError


def chosen(checks: Sequence[Check], only: Sequence[str]) -> list[Check]:
    """The checks that ``only`` names; all when it is empty.

    Raises:
        PdctlError: no category and no code is called that (code 2).
    """
    if not only:
        return list(checks)
    known = {category.value for category in Category} | {check.code for check in checks}
    for name in only:
        if _plain(name) not in known:
            near = difflib.get_close_matches(_plain(name), known, 1)
            hint = f"; did you mean {near[0]}" if near else ""
            raise PdctlError(
                f"--only {name}: neither a category ({', '.join(c.value for c in Category)}) nor "
                f"a code{hint}",
                2,
            )
    wanted = {_plain(name) for name in only}
    return [check for check in checks if {check.code, check.category.value} & wanted]


def _plain(name: str) -> str:
    return name.upper() if name[:2].upper() == "PD" and name[2:].isdigit() else name.lower()
