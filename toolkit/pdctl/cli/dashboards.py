"""pdctl dashboards"""

import dataclasses
import os
import sys
from pathlib import Path

import click

from pdctl.cli.common import json_option, print_json, read_plan
from pdctl.errors import PdctlError
from pdctl.observe.boards import BOARDS
from pdctl.observe.check import Found, check_boards, check_rules
from pdctl.observe.conditions import JOB
from pdctl.observe.grafana_http import Grafana
from pdctl.observe.grafana_rules import rule_group
from pdctl.observe.panel import Scope
from pdctl.observe.prometheus import Prometheus
from pdctl.observe.push import push_all
from pdctl.observe.stack import PROMETHEUS_UID, alert_settings

TOKEN_VARIABLE = "GRAFANA_TOKEN"


@click.group("dashboards")
def command() -> None:
    """Build the dashboards, check them against a Prometheus, push them to a Grafana."""


@command.command("build")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to write into; made when missing.",
)
def build(output: Path) -> None:
    """Write the dashboards' JSON and the alert rules with their default windows."""
    try:
        from pdctl.observe.built import built_files  # noqa: PLC0415, the extra may be missing
    except ModuleNotFoundError as error:
        raise PdctlError(
            f"{error.name} is not installed; install pdctl with the extra observability", 2
        ) from None
    output.mkdir(parents=True, exist_ok=True)
    for name, text in built_files().items():
        (output / name).write_text(text, encoding="utf-8", newline="\n")
        click.echo(output / name)


@command.command("check")
@click.option(
    "--prometheus", "url", default="http://127.0.0.1:9090", show_default=True, help="Its URL."
)
@click.option("--window", default="5m", show_default=True, help="Span of rates and sums.")
@click.option("--deployment", help="Only this deployment's series.")
@json_option
def check(url: str, window: str, deployment: str | None, as_json: bool) -> None:
    """Run every query of every panel and rule, and list those that find no data, with the reason.

    Rules are those that the Prometheus evaluates. Exit code 0 when all find data, else 1.
    """

    prometheus = Prometheus(url)
    values = {"deployment": deployment} if deployment else {}
    scope = Scope(window, window, values=values)
    rows = [*check_boards(prometheus, BOARDS, scope), *check_rules(prometheus, prometheus.rules())]
    empty = [row for row in rows if row.found is Found.NO_DATA]
    if as_json:
        print_json({"queries": [dataclasses.asdict(row) for row in rows]})
    else:
        for row in empty:
            click.echo(f"{row.kind:5}  {row.where}: {row.reason}")
        if not any(row.kind == "rule" for row in rows):
            click.echo(f"{url} evaluates no alert rules", err=True)
        for series in prometheus.instant(f'up{{job="{JOB}"}} == 0'):
            where = {"leg": "?", "instance": "?"} | series.labels
            click.echo(f"{where['leg']} at {where['instance']} does not answer {url}", err=True)
        click.echo(f"{len(rows) - len(empty)} of {len(rows)} queries find data")
    sys.exit(1 if empty else 0)


@command.command("push")
@click.option("--grafana", "url", required=True, help="Its URL.")
@click.option(
    "--spec",
    type=click.Path(path_type=Path),
    help="Also push the data sources, objective and playbook links of this spec.",
)
@click.option(
    "--alerts",
    is_flag=True,
    help="Also push the alert rules of the spec, for Grafana to evaluate and to notify.",
)
@click.option("--folder", default="pdctl", show_default=True, help="Grafana folder, by its title.")
@click.option("--dry-run", is_flag=True, help="Show what would change, change nothing.")
@click.option(
    "--ca", type=click.Path(path_type=Path), help="File of the CA that signed its certificate."
)
@json_option
def push(
    url: str,
    spec: Path | None,
    alerts: bool,
    folder: str,
    dry_run: bool,
    ca: Path | None,
    as_json: bool,
) -> None:
    """Put the dashboards into a Grafana; a second time changes nothing.

    The token of a service account is read from the environment variable GRAFANA_TOKEN.
    """
    if alerts and not spec:
        raise click.UsageError("--alerts needs --spec: windows and objectives are the spec's")
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise PdctlError(
            f"{TOKEN_VARIABLE} is not set: it holds the token of a Grafana service account", 2
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise PdctlError(f"{TOKEN_VARIABLE} holds characters that no token has", 2)
    loaded, deployment = read_plan(spec, None) if spec else (None, None)
    rules = None
    if alerts and loaded and deployment:
        settings = alert_settings(loaded.spec, deployment)
        rules = rule_group(settings, deployment.name, PROMETHEUS_UID)
    grafana = Grafana(url, token, ca)
    changes = push_all(grafana, folder, loaded.spec if loaded else None, rules, dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "changes": [dataclasses.asdict(each) for each in changes]})
        return
    # Each as it is made: what was done before a failure is told too.
    for change in changes:
        click.echo(f"{change.action:9} {change.kind} {change.name}")
        for line in change.difference:
            click.echo(f"          {line}")
