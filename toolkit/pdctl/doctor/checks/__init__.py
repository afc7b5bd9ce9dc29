"""All checks: every module of this package has a tuple ``CHECKS``."""

import importlib
import pkgutil

from pdctl.doctor.model import Check

ALL: tuple[Check, ...] = tuple(
    sorted(
        (
            check
            for module in pkgutil.iter_modules(__path__)
            for check in importlib.import_module(f"{__name__}.{module.name}").CHECKS
        ),
        key=lambda check: check.code,
    )
)
"""In the order of their codes."""
