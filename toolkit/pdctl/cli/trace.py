"""pdctl trace"""

import re
import shutil
from pathlib import Path

import click

from pd_connector.contract import Outcome
from pdctl.cli.common import json_option, print_json
from pdctl.errors import PdctlError
from pdctl.observe.spans import Span, Tempo, choose, read_file
from pdctl.observe.waterfall import lines, rows


@click.command("trace")
@click.argument("trace_id", required=False)
@click.option("--file", "file", type=click.Path(path_type=Path), help="OTLP JSON lines.")
@click.option(
    "--tempo",
    default="http://127.0.0.1:3200",
    show_default=True,
    help="Tempo's URL; asked when there is no --file.",
)
@click.option("--slowest", is_flag=True, help="The turn that took longest.")
@click.option(
    "--outcome",
    type=click.Choice([each.value for each in Outcome]),
    help="The latest turn with this outcome; with --slowest, the slowest of them.",
)
@json_option
def command(
    trace_id: str | None,
    file: Path | None,
    tempo: str,
    slowest: bool,
    outcome: str | None,
    as_json: bool,
) -> None:
    """Show the trace TRACE_ID, or the one that is asked for, as a waterfall.

    Columns: span, process, milliseconds from the trace's start, duration.
    """
    if trace_id and (slowest or outcome):
        raise click.UsageError("TRACE_ID excludes --slowest and --outcome")
    if not (trace_id or slowest or outcome):
        raise click.UsageError("give a TRACE_ID, --slowest or --outcome")
    if trace_id and not re.fullmatch(r"[0-9a-fA-F]{1,32}", trace_id):
        raise PdctlError(f"{trace_id!r} is not a trace id: up to 32 hexadecimal digits", 2)
    spans = (
        _from_file(file, trace_id, outcome, slowest)
        if file
        else _from_tempo(Tempo(tempo), trace_id, outcome, slowest)
    )
    if as_json:
        print_json({"trace_id": spans[0].trace, "spans": rows(spans)})
        return
    for line in lines(spans, shutil.get_terminal_size((110, 24)).columns):
        click.echo(line)


def _from_file(file: Path, trace_id: str | None, outcome: str | None, slowest: bool) -> list[Span]:
    spans = read_file(file)
    wanted = trace_id.lower().zfill(32) if trace_id else choose(spans, outcome, slowest)
    found = [span for span in spans if span.trace == wanted]
    if not found:
        raise PdctlError(f"{file}: {_nothing(trace_id, outcome)}")
    return found


def _from_tempo(
    tempo: Tempo, trace_id: str | None, outcome: str | None, slowest: bool
) -> list[Span]:
    wanted = trace_id or tempo.find(outcome, slowest)
    found = tempo.trace(wanted) if wanted else []
    if not found:
        raise PdctlError(f"{tempo.url}: {_nothing(trace_id, outcome)}")
    return found


def _nothing(trace_id: str | None, outcome: str | None) -> str:
    if trace_id:
        return f"no trace {trace_id}"
    return f"no turn with outcome {outcome}" if outcome else "no turn"
