"""pdctl logs"""

import os
import re
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

import click

from pdctl.cli.common import deployment_argument
from pdctl.errors import PdctlError
from pdctl.launch.state import DeploymentState

LEG_NAME = r"(prefill|decode|router)-\d+"
_POLL_SECONDS = 0.2


@click.command("logs")
@deployment_argument()
@click.argument("leg")
@click.option("-f", "--follow", is_flag=True, help="Keep printing what is added, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last N lines.")
def command(deployment: str, leg: str, follow: bool, lines: int | None) -> None:
    """Print the log of LEG (prefill-0, decode-0, router-0, ...) of DEPLOYMENT."""
    state = DeploymentState(deployment)
    log = state.log(leg)
    if not re.fullmatch(LEG_NAME, leg) or not log.is_file():
        known = sorted(path.stem for path in state.folder.glob("*.log"))
        hint = f"there is {', '.join(known)}" if known else "nothing was started under this name"
        raise PdctlError(f"{deployment} has no log of {leg}; {hint}", 2)
    stream: BinaryIO = log.open("rb")
    for line in stream if lines is None else deque(stream, maxlen=lines):
        click.echo(line, nl=False)
    while follow:
        time.sleep(_POLL_SECONDS)
        click.echo(stream.read(), nl=False)
        stream = _current(log, stream)


def _current(log: Path, stream: BinaryIO) -> BinaryIO:
    """The stream, or that of the new log when the leg was restarted."""
    try:
        if log.stat().st_ino == os.fstat(stream.fileno()).st_ino:
            return stream
        return log.open("rb")
    except FileNotFoundError:
        return stream
