"""The user's one YAML file: what it may say, and what is wrong with it."""

from pdctl.spec.faults import Fault, SpecError
from pdctl.spec.load import Loaded, load
from pdctl.spec.model import Spec

__all__ = ["Fault", "Loaded", "Spec", "SpecError", "load"]
