"""Programs that are not Python packages and that some tests run for real."""

import os
import shutil

import pytest


def program(name: str) -> str:
    """Path of a program, e.g. ``promtool``; without it the test is skipped, in CI it fails."""
    path = shutil.which(name)
    if path is None:
        missing = f"{name} is not installed: run `make packages` (requirements/debian.txt)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path
