"""The command line, run in this process."""

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from pdctl.cli import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What it complained about, line by line."""
        return self.err.split("\n")[:-1]


def pdctl(*args: object) -> Ended:
    """Run ``pdctl ARGS``. Whatever it does not handle itself is raised here."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["pdctl", *map(str, args)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code or 0
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue())
