"""What several commands share: reading a spec, choosing a deployment."""

import functools
import json
import re
import signal
from pathlib import Path
from typing import Any

import click

from pdctl.errors import PdctlError
from pdctl.plan import Deployment, plan
from pdctl.spec import Loaded, SpecError, load
from pdctl.spec.model import NAME

spec_argument = click.argument("spec", type=click.Path(path_type=Path))


def _deployment_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A deployment's name, also given as the spec file that says it."""
    if value is None or re.fullmatch(NAME, value):
        return value
    if not (value.endswith((".yaml", ".yml")) or "/" in value):
        raise PdctlError(f"{value!r} is neither a deployment's name nor a spec file", 2)
    try:
        return load(Path(value)).spec.name
    except SpecError as error:
        raise PdctlError(
            f"{error}\nto act on what runs in spite of this, give the deployment's name", 2
        ) from None


deployment_argument = functools.partial(click.argument, "deployment", callback=_deployment_name)
bidir_option = click.option(
    "--bidir",
    type=click.Choice(["on", "off"]),
    help="Bidirectional transfer on all legs, instead of what the spec says.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def read_spec(path: Path, bidirectional: bool | None = None) -> Loaded:
    """The spec, with bidirectional transfer as it is or as asked for; its warnings go to stderr.

    Raises:
        PdctlError: with every fault, one a line, and exit code 2.
    """
    try:
        loaded = load(path, bidirectional)
    except SpecError as error:
        raise PdctlError(str(error), 2) from None
    for warning in loaded.warnings:
        click.echo(str(warning), err=True)
    return loaded


def read_plan(path: Path, bidir: str | None = None) -> tuple[Loaded, Deployment]:
    loaded = read_spec(path, None if bidir is None else bidir == "on")
    return loaded, plan(loaded.spec, path.parent)


def interrupt_on_hangup() -> None:
    """Clean up like after Ctrl-C when the terminal goes away or someone ends the command."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
