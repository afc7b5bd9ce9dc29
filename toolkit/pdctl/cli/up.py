"""pdctl up"""

import sys
from pathlib import Path

import click

from pdctl.cli.common import bidir_option, interrupt_on_hangup, read_plan, spec_argument
from pdctl.cli.progress import Progress
from pdctl.doctor.checks import ALL
from pdctl.doctor.diagnose import preflight
from pdctl.doctor.report import shown
from pdctl.errors import PdctlError
from pdctl.launch.up import bring_up
from pdctl.plan import Deployment
from pdctl.spec import Loaded


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
@click.option("--skip-checks", is_flag=True, help="Start even if this node cannot run it well.")
def command(spec: Path, bidir: str | None, timeout: float, skip_checks: bool) -> None:
    """Start the legs of SPEC on this machine and wait until all are healthy.

    Before anything is started, the cheap checks of `pdctl doctor` look at this node; what they call
    an error stops here.

    Legs that run already and have not changed are left alone; changed ones are restarted.
    """
    loaded, deployment = read_plan(spec, bidir)
    interrupt_on_hangup()
    if not skip_checks:
        _check(loaded, deployment)
    with Progress(sys.stderr) as progress:
        bring_up(deployment, timeout, progress.say, progress.watch)
    click.echo(
        f"{deployment.name}: up, bidirectional {'on' if deployment.bidirectional else 'off'}"
    )
    click.echo(f"router: {deployment.router.url}/v1 (model {deployment.served_name})")


def _check(loaded: Loaded, deployment: Deployment) -> None:
    """Raises PdctlError: a cheap check found an error."""
    text = loaded.path.read_text(encoding="utf-8", errors="replace")
    found = preflight(deployment, loaded.spec, text, ALL).findings
    errors = [each for each in found if each.severity == "error"]
    for each in found:
        if each.severity != "info":
            click.echo(
                f"{each.severity} {each.check.code} {each.finding.leg}: "
                f"{shown(each.finding.cause)}\n  fix: {shown(each.finding.fix)}\n"
                f"  more: pdctl runbook {each.check.code}",
                err=True,
            )
    if errors:
        raise PdctlError("nothing was started; `--skip-checks` starts it all the same")
