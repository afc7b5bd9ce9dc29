"""Other people's clients, run as they are, and what they report."""

from pdctl.bench.adapters.run import run_adapter

__all__ = ["run_adapter"]
