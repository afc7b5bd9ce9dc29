"""pdctl down"""

import click

from pdctl.cli.common import deployment_argument
from pdctl.launch.state import DeploymentState
from pdctl.launch.up import take_down


@click.command("down")
@deployment_argument()
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    help="Seconds for a leg to end by itself before it is killed; by default 20, and for the "
    "router 10 more than its drain_timeout.",
)
def command(deployment: str, grace: float | None) -> None:
    """Stop every leg of DEPLOYMENT (a spec file or a deployment's name) that pdctl started.

    Logs stay. Nothing running is not an error.
    """
    state = DeploymentState(deployment)
    if not state.records():
        click.echo(f"{deployment}: nothing to stop")
        return
    take_down(state, grace, lambda line: click.echo(line, err=True))
    click.echo(f"{deployment}: down")
