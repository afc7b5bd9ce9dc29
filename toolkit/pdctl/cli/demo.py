"""pdctl demo"""

import sys
import uuid
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pdctl.cli.common import interrupt_on_hangup, json_option, print_json, read_plan, spec_argument
from pdctl.cli.progress import Progress
from pdctl.demo import Comparison, DemoTurn, hold_conversation
from pdctl.errors import PdctlError
from pdctl.launch.state import DeploymentState
from pdctl.launch.up import bring_up, leg_statuses, take_down


@click.command("demo")
@spec_argument
@click.option("--timeout", type=click.FloatRange(min=1), default=900.0, show_default=True)
@json_option
def command(spec: Path, timeout: float, as_json: bool) -> None:
    """Bring SPEC up, hold one conversation, and again with bidirectional transfer off.

    Prints both side by side and takes everything down. Exit code 1 when nothing was read back or
    the answers differ.
    """
    interrupt_on_hangup()
    run_id = uuid.uuid4().hex[:8]
    turns: dict[str, list[DemoTurn]] = {}
    with Progress(sys.stderr) as progress:
        for bidir in ("on", "off"):
            loaded, deployment = read_plan(spec, bidir)
            state = DeploymentState(deployment.name)
            if any(status.pid for status in leg_statuses(state)):
                raise PdctlError(
                    f"{deployment.name} is up already: run 'pdctl down {deployment.name}' first", 2
                )
            progress.say(f"== bidirectional {bidir}")
            try:
                bring_up(deployment, timeout, progress.say, progress.watch)
                turns[bidir] = hold_conversation(
                    loaded.spec, deployment, run_id, bidir == "off", progress.say
                )
            finally:
                take_down(state, None, progress.say)
    comparison = Comparison(turns["on"], turns["off"])
    problems = comparison.problems()
    if as_json:
        print_json({"ok": not problems, "problems": problems, "turns": _rows(comparison)})
    else:
        _print(comparison)
        for problem in problems:
            click.echo(f"PROBLEM: {problem}", err=True)
        if not problems:
            click.echo("answers of on, off and one engine alone are equal")
        gains = comparison.prefill_gains()
        if gains:
            click.echo(
                f"prefill from turn 2 on: {min(gains):.1f} to {max(gains):.1f} times as fast with "
                "readback"
            )
    sys.exit(1 if problems else 0)


def _row(turn: DemoTurn) -> dict[str, Any]:
    return {
        "turn": turn.number,
        "prompt_tokens": turn.counted.prompt_tokens,
        "tokens_read_back": turn.counted.external_tokens,
        "tokens_computed": turn.counted.computed_tokens + turn.counted.cached_tokens,
        "prefill_ms": turn.turn.prefill_ms,
        "ttft_ms": turn.turn.ttft_ms,
        "outcome": turn.turn.outcome,
        "answer": turn.turn.text,
        "plain_answer": turn.plain,
    }


def _rows(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {"bidirectional": bidir, **_row(turn)}
        for bidir, turns in (("on", comparison.on), ("off", comparison.off))
        for turn in turns
    ]


def _print(comparison: Comparison) -> None:
    table = Table(
        title="The same conversation with bidirectional transfer on and off",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for heading in ("turn", "bidir", "prompt", "read back", "computed", "prefill ms", "TTFT ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for on, off in zip(comparison.on, comparison.off, strict=True):
        for bidir, turn in (("on", on), ("off", off)):
            row = _row(turn)
            read_back = str(row["tokens_read_back"])
            if bidir == "on" and turn.number > 1:
                read_back += f" ({comparison.share_read_back(turn.number):.0%})"
            table.add_row(
                str(turn.number) if bidir == "on" else "",
                bidir,
                str(row["prompt_tokens"]),
                read_back,
                str(row["tokens_computed"]),
                "-" if row["prefill_ms"] is None else f"{row['prefill_ms']:.0f}",
                f"{row['ttft_ms']:.0f}",
                str(row["outcome"]),
            )
    Console().print(table)
    click.echo(
        "read back: tokens from decode, and their share of what it held after the turn before"
    )
