"""pdctl observe"""

import time
from pathlib import Path

import click

from pdctl.cli.common import bidir_option, deployment_argument, read_plan, spec_argument
from pdctl.errors import PdctlError
from pdctl.observe import local
from pdctl.observe.names import page
from pdctl.observe.prometheus import Prometheus
from pdctl.observe.report import Look, report
from pdctl.observe.stack import stack_files
from pdctl.spec.units import parse_duration


@click.group("observe")
def command() -> None:
    """Watch a deployment: Prometheus, Alertmanager, Grafana, Tempo, and a report without them."""


@command.command("render")
@spec_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to write into; made when missing.",
)
@bidir_option
def render(spec: Path, output: Path, bidir: str | None) -> None:
    """Write the configuration of everything that watches the deployment of SPEC.

    compose.yaml runs all of it: GRAFANA_ADMIN_PASSWORD=... docker compose up -d
    """
    loaded, deployment = read_plan(spec, bidir)
    try:
        for file in stack_files(loaded.spec, deployment):
            path = output / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8", newline="\n")
            path.chmod(0o644)
            click.echo(path)
    except OSError as error:
        raise PdctlError(f"{error.filename or output}: {error.strerror}", 2) from None


@command.command("up")
@spec_argument
@bidir_option
def up(spec: Path, bidir: str | None) -> None:
    """Run Prometheus and Alertmanager for the deployment of SPEC on this machine.

    Both must be installed. Running it again starts what has ended and restarts what has changed.
    """
    loaded, deployment = read_plan(spec, bidir)
    for line in local.start(loaded.spec, deployment):
        click.echo(line)


@command.command("down")
@deployment_argument()
@click.option("--grace", default=10.0, show_default=True, help="Seconds before force is used.")
def down(deployment: str, grace: float) -> None:
    """Stop what 'pdctl observe up' started for DEPLOYMENT (a spec file or a name)."""
    lines = list(local.end(deployment, grace))
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo(f"{deployment}: nothing that watches it runs", err=True)


@command.command("report")
@click.option(
    "--prometheus", "url", default="http://127.0.0.1:9090", show_default=True, help="Its URL."
)
@click.option("--deployment", help="Only this deployment's series.")
@click.option("--last", default="1h", show_default=True, help="How far back.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="File to write.",
)
@click.option(
    "--theme",
    type=click.Choice(["auto", "light", "dark"]),
    default="auto",
    show_default=True,
    help="auto follows the reader's system.",
)
@click.option(
    "--playbooks", help="URL below which the playbook pages are; the Prometheus when left out."
)
@click.option("--ttft-slo", default="2.5s", show_default=True, help="The TTFT objective.")
def draw(
    url: str,
    deployment: str | None,
    last: str,
    output: Path,
    theme: str,
    playbooks: str | None,
    ttft_slo: str,
) -> None:
    """Draw the dashboards from a Prometheus as one page of HTML that needs nothing else."""
    try:
        seconds, objective = parse_duration(last), parse_duration(ttft_slo)
    except ValueError as error:
        raise PdctlError(str(error), 2) from None
    end = time.time()
    look = Look(
        end - seconds,
        end,
        deployment,
        playbooks or f"{url.rstrip('/')}/consoles",
        str(objective),
        theme,
    )
    text = report(Prometheus(url), look, lambda title: click.echo(f"drawing {title}", err=True))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PdctlError(f"{output}: {error.strerror}", 2) from None
    click.echo(output)


@command.command("names")
def names() -> None:
    """Print every metric, span and attribute with its meaning, as Markdown (docs/telemetry.md)."""
    click.echo(page(), nl=False)
