"""Waiting for what a test can see, with a deadline."""

import time
from collections.abc import Callable
from typing import Any


def until(what: str, holds: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until ``holds()`` is true.

    Raises:
        AssertionError: it is not after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
