"""pdctl validate"""

import sys
from pathlib import Path

import click

from pdctl.cli.common import json_option, print_json
from pdctl.spec import Fault, SpecError, load


@click.command("validate")
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def command(specs: tuple[Path, ...], as_json: bool) -> None:
    """Check SPECS and list everything wrong with them at file:line:column.

    Exit code 2 when a spec has an error; warnings alone leave it 0.
    """
    faults: list[Fault] = []
    for path in specs:
        try:
            faults += load(path).warnings
        except SpecError as error:
            faults += error.faults
    bad = {fault.file for fault in faults if fault.level == "error"}
    if as_json:
        print_json({"valid": not bad, "faults": [vars(fault) for fault in faults]})
    else:
        for fault in faults:
            click.echo(str(fault), err=True)
        for path in specs:
            if str(path) not in bad:
                click.echo(f"{path}: ok")
    sys.exit(2 if bad else 0)
