"""pdctl status"""

import dataclasses
import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdctl.cli.common import deployment_argument, json_option, print_json
from pdctl.launch.state import DeploymentState, deployments
from pdctl.launch.up import LegStatus, Phase, leg_statuses

_COLORS = {"healthy": "green", "starting": "yellow", "unhealthy": "red", "dead": "red"}


@click.command("status")
@deployment_argument(required=False)
@json_option
@click.option("--watch", is_flag=True, help="Keep showing it, until Ctrl-C.")
def command(deployment: str | None, as_json: bool, watch: bool) -> None:
    """Show the legs of DEPLOYMENT (a spec file or a name), or of all deployments.

    Exit code 0 when every leg is healthy, 1 when one is not or there is none.
    """
    if watch and as_json:
        raise click.UsageError("--watch and --json exclude each other")
    if watch:
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                live.update(_table(_all(deployment)), refresh=True)
                time.sleep(1)
    statuses = _all(deployment)
    if as_json:
        print_json({"legs": [_row(name, status) for name, status in statuses]})
    elif statuses:
        _print(statuses)
    else:
        click.echo(f"{deployment or 'no deployment'}: nothing runs", err=True)
    good = bool(statuses) and all(status.phase is Phase.HEALTHY for _, status in statuses)
    sys.exit(0 if good else 1)


def _all(deployment: str | None) -> list[tuple[str, LegStatus]]:
    names = [deployment] if deployment else deployments()
    return [(name, status) for name in names for status in leg_statuses(DeploymentState(name))]


def _row(deployment: str, status: LegStatus) -> dict[str, Any]:
    return {
        "deployment": deployment,
        **dataclasses.asdict(status.record),
        "phase": status.phase.value,
        "pid": status.pid,
        "detail": status.detail,
        "last_line": status.last_line,
        "log": str(DeploymentState(deployment).log(status.record.name)),
    }


def _table(statuses: list[tuple[str, LegStatus]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("deployment", "leg", "state", "bidir", "pid", "up", "url"):
        table.add_column(heading, no_wrap=True)
    for name, status in statuses:
        record = status.record
        table.add_row(
            name,
            record.name,
            Text(status.phase.value, style=_COLORS[status.phase.value]),
            "on" if record.bidirectional else "off",
            str(status.pid or "-"),
            _age(time.time() - record.started_at) if status.pid else "-",
            record.url,
        )
    return table


def _print(statuses: list[tuple[str, LegStatus]]) -> None:
    # Whole lines whatever the terminal's width: a cut pid or reason is of no use.
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, 200)
    console.print(_table(statuses))
    for _, status in statuses:
        if status.detail:
            console.print(Text(f"{status.record.name}: {status.detail}"))


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
