"""pdctl logs"""

import time
from collections import deque
from pathlib import Path

import click

from pdctl.cli.common import deployment_argument
from pdctl.errors import PdctlError
from pdctl.launch.state import DeploymentState

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
    if not log.is_file():
        known = sorted(path.stem for path in state.folder.glob("*.log"))
        hint = f"there is {', '.join(known)}" if known else "nothing was started under this name"
        raise PdctlError(f"{deployment} has no log of {leg}; {hint}", 2)
    position = _print(log, lines)
    while follow:
        time.sleep(_POLL_SECONDS)
        position = _print_new(log, position)


def _print(log: Path, lines: int | None) -> int:
    with log.open("rb") as stream:
        chosen = stream if lines is None else deque(stream, maxlen=lines)
        for line in chosen:
            click.echo(line, nl=False)
        return stream.tell()


def _print_new(log: Path, position: int) -> int:
    """Print from ``position`` on; a restarted leg's new log from its beginning."""
    try:
        with log.open("rb") as stream:
            if stream.seek(0, 2) < position:
                position = 0
            stream.seek(position)
            click.echo(stream.read(), nl=False)
            return stream.tell()
    except FileNotFoundError:
        return 0
