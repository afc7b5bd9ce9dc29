"""Running one of them against a URL."""

from typing import Any

from pdctl.bench.client import Target
from pdctl.bench.records import RunFolder
from pdctl.bench.run import Say
from pdctl.errors import PdctlError


def run_adapter(asked: Any, target: tuple[str, Target], out: RunFolder, say: Say) -> None:
    raise PdctlError(f"--client {asked.client}: not there", 2)
