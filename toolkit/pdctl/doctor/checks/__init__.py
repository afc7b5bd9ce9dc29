"""All checks. One file per subject; each has a tuple ``CHECKS``."""

from pdctl.doctor.checks import example_fabric
from pdctl.doctor.model import Check

ALL: tuple[Check, ...] = (*example_fabric.CHECKS,)
