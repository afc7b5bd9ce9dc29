"""pdctl doctor"""

import sys
from pathlib import Path

import click

from pdctl.doctor.checks import ALL
from pdctl.doctor.evidence.bundle import read_bundle
from pdctl.doctor.run import diagnose, patterns


@click.command("doctor")
@click.option("--bundle", type=click.Path(path_type=Path), required=True, help="Evidence to read.")
def command(bundle: Path) -> None:
    """Say what is wrong, on what evidence, and what to do."""
    diagnosis = diagnose(read_bundle(bundle, patterns(ALL)), ALL)
    for each in diagnosis.findings:
        click.echo(f"{each.check.code} {each.severity} {each.finding.leg}: {each.check.title}")
    sys.exit(1 if diagnosis.worst() == "error" else 0)
