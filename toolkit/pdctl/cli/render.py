"""pdctl render"""

from pathlib import Path

import click

from pdctl.cli.common import bidir_option, read_plan, spec_argument
from pdctl.errors import PdctlError
from pdctl.render import render


@click.command("render")
@spec_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to write into; made when missing.",
)
@bidir_option
def command(spec: Path, output: Path, bidir: str | None) -> None:
    """Write one start script per leg of SPEC, and cleanup.sh, into a folder.

    A script needs no pdctl command on its node: copy it there and run it.
    """
    _, deployment = read_plan(spec, bidir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for file in render(deployment):
            path = output / file.name
            path.write_text(file.text, encoding="utf-8", newline="\n")
            path.chmod(0o755 if file.executable else 0o644)
            click.echo(path)
    except OSError as error:
        raise PdctlError(f"{error.filename or output}: {error.strerror}", 2) from None
