"""All checks: a module of this package that holds some has a tuple ``CHECKS``; one that knows
further ways to see what those look for has a tuple ``MORE``."""

import importlib
import pkgutil
from collections.abc import Iterator

from pdctl.doctor.model import Check, More


def _all() -> Iterator[Check]:
    names = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(name) for name in names]
    more: list[More] = [each for module in modules for each in getattr(module, "MORE", ())]
    for module in modules:
        for check in getattr(module, "CHECKS", ()):
            for each in more:
                if each.code == check.code:
                    check = each.added_to(check)  # noqa: PLW2901
            yield check


ALL: tuple[Check, ...] = tuple(sorted(_all(), key=lambda check: check.code))
"""In the order of their codes."""
