"""The user's one YAML file: what it may say, and what is wrong with it."""

from pdctl.spec.load import Fault, Loaded, SpecError, load
from pdctl.spec.model import Spec

__all__ = ["Fault", "Loaded", "Spec", "SpecError", "load"]
