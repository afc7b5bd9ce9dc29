"""pdctl collect"""

import sys
import tempfile
from pathlib import Path

import click

from pdctl.cli.common import interrupt_on_hangup, read_plan, spec_argument
from pdctl.doctor.evidence.live import collect
from pdctl.doctor.evidence.pack import pack
from pdctl.doctor.evidence.probe import hold_probe
from pdctl.errors import PdctlError


@click.command("collect")
@spec_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The bundle to write, a .tar.gz.",
)
@click.option("--probe", is_flag=True, help="Also hold two turns through the router.")
def command(spec: Path, output: Path, probe: bool) -> None:
    """Gather the evidence of SPEC's deployment into one file for `pdctl doctor --bundle`.

    Settings, metrics, logs, versions and the facts of this node. Keys, tokens and prompts are
    taken out. For a deployment on several nodes, run it on each.
    """
    _, deployment = read_plan(spec)
    interrupt_on_hangup()
    if not output.parent.is_dir():
        raise PdctlError(f"{output}: there is no folder {output.parent}", 2)
    with tempfile.TemporaryDirectory(prefix="pdctl-collect-") as folder:
        if probe:
            _say("holding two probe turns")
            hold_probe(deployment, Path(folder))
        text = spec.read_text(encoding="utf-8", errors="replace")
        found = collect(deployment, text, Path(folder), _say)
        size = pack(found, output, _say)
    for gap in found.gaps:
        click.echo(f"not collected: {gap}", err=True)
    click.echo(f"{output}: {size / 1e6:.1f} MB; `pdctl doctor --bundle {output}` reads it")


def _say(line: str) -> None:
    click.echo(line, err=True)
    sys.stderr.flush()
