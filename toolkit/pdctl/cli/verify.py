"""pdctl verify"""

import sys
from pathlib import Path

import click

from pdctl.cli.common import bidir_option, json_option, print_json, read_plan, spec_argument
from pdctl.verify import Step, verify


@click.command("verify")
@spec_argument
@bidir_option
@json_option
def command(spec: Path, bidir: str | None, as_json: bool) -> None:
    """Prove on the running deployment of SPEC that KV really comes back from decode.

    Holds two streamed turns through the router and believes the engines' counters alone; with
    other traffic at the same time they also count that. Exit code 1 when a step breaks; the last
    step says which.
    """
    loaded, deployment = read_plan(spec, bidir)
    result = verify(loaded.spec, deployment, _ignore if as_json else _print)
    if as_json:
        print_json({"ok": result.ok, "steps": [vars(step) for step in result.steps]})
    elif result.ok:
        click.echo(f"{deployment.name}: verified, decode's KV is reused")
    else:
        click.echo(f"{deployment.name}: NOT verified: {result.steps[-1].name} does not hold")
    sys.exit(0 if result.ok else 1)


def _print(step: Step) -> None:
    click.echo(f"{'ok  ' if step.ok else 'FAIL'}  {step.name}: {step.detail}")


def _ignore(step: Step) -> None:
    pass
