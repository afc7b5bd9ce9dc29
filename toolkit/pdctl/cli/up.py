"""pdctl up"""

import sys
from pathlib import Path

import click

from pdctl.cli.common import bidir_option, interrupt_on_hangup, read_plan, spec_argument
from pdctl.cli.progress import Progress
from pdctl.launch.up import bring_up


@click.command("up")
@spec_argument
@bidir_option
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    help="Seconds for the legs to become healthy.",
)
def command(spec: Path, bidir: str | None, timeout: float) -> None:
    """Start the legs of SPEC on this machine and wait until all are healthy.

    Legs that run already and have not changed are left alone; changed ones are restarted.
    """
    _, deployment = read_plan(spec, bidir)
    interrupt_on_hangup()
    with Progress(sys.stderr) as progress:
        bring_up(deployment, timeout, progress.say, progress.watch)
    click.echo(
        f"{deployment.name}: up, bidirectional {'on' if deployment.bidirectional else 'off'}"
    )
    click.echo(f"router: {deployment.router.url}/v1 (model {deployment.served_name})")
