"""All checks: a module of this package that holds some has a tuple ``CHECKS``."""

import importlib
import pkgutil

from pdctl.doctor.model import Check

ALL: tuple[Check, ...] = tuple(
    sorted(
        (
            check
            for module in pkgutil.iter_modules(__path__)
            for check in getattr(importlib.import_module(f"{__name__}.{module.name}"), "CHECKS", ())
        ),
        key=lambda check: check.code,
    )
)
"""In the order of their codes."""
