"""pdctl bench"""

import sys
import time
from pathlib import Path
from typing import Any

import click

from pdctl.bench.compare import one_run
from pdctl.bench.report.data import result_of
from pdctl.bench.report.export import as_data
from pdctl.bench.report.text import as_text
from pdctl.bench.upstream import write_stats
from pdctl.cli.bench_setup import Asked, run_other_client, run_own_client
from pdctl.cli.common import interrupt_on_hangup, print_json
from pdctl.cli.progress import Progress


@click.command("bench")
@click.argument("spec", type=click.Path(path_type=Path), required=False)
@click.option("--quick", is_flag=True, help="A small sweep, for a small machine: 1k to 6k tokens.")
@click.option("--lengths", help="Prompt lengths of the sweep, in tokens.  [default: 2k to 24k]")
@click.option(
    "--shape",
    type=click.Choice(["grow", "second"]),
    default="grow",
    show_default=True,
    help="grow: one conversation through all lengths. second: a two-turn conversation for each.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="What the second turn of shape 'second' adds.",
)
@click.option("--answer-tokens", type=click.IntRange(1), help="Of every answer.  [default: 32]")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Conversations in the input format of vLLM's multi-turn benchmark.",
)
@click.option(
    "--agentic",
    type=click.IntRange(1),
    metavar="N",
    help="N conversations of agents with long system prompts and tool results.",
)
@click.option(
    "--turns",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    help="Of every agentic conversation.",
)
@click.option(
    "--system-tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Of the agents' system prompt.",
)
@click.option(
    "--gap",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Mean think time between agents' turns, in seconds.",
)
@click.option(
    "--arms",
    default=None,
    help="What to compare: off,on, or of recompute,readback,append,auto.  [default: off,on]",
)
@click.option("--repeats", type=click.IntRange(1), help="[default: 5]")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How often to go back and forth between arms that restart the engines.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Conversations side by side.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="New conversations per second, at random times.",
)
@click.option("--seed", help="Of the texts; another at every run when left out.")
@click.option(
    "--endpoint",
    type=click.Choice(["chat", "completions"]),
    default="chat",
    show_default=True,
    help="completions: prompts of token ids, for models whose text "
    "does not tokenize to the tokens it came from.",
)
@click.option(
    "--client",
    type=click.Choice(["pdctl", "http", "aiperf", "multiturn"]),
    default="pdctl",
    show_default=True,
    help="http: our client against any URL. aiperf, multiturn: other people's clients.",
)
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="[NAME=]URL",
    help="For the client http: where to send, one arm for each.",
)
@click.option("--model", help="For the client http.  [default: the first of /v1/models]")
@click.option("--session-header", help="Name the conversation in this header, not in the body.")
@click.option(
    "--prefill-url",
    "prefill_urls",
    multiple=True,
    help="For the client http: a prefill engine, to read its counters.",
)
@click.option(
    "--decode-url",
    "decode_urls",
    multiple=True,
    help="For the client http: a decode engine, to read its counters.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Model folder to count tokens with, instead of the engine's /tokenize.",
)
@click.option("--no-salt", is_flag=True, help="Do not send vLLM's cache_salt.")
@click.option(
    "--age/--no-age",
    default=None,
    help="Shuffle the engines' free blocks first.  [default: on CUDA]",
)
@click.option(
    "--attach", is_flag=True, help="Use the deployment that runs, as it is, and leave it running."
)
@click.option("--keep", is_flag=True, help="Leave the deployment running afterwards.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    help="Seconds; no repeat is begun that would not end by then.",
)
@click.option(
    "--error-budget",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="Share of turns that may fail before the run stops.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=900.0,
    show_default=True,
    help="Seconds for the legs to become healthy.",
)
@click.option(
    "--program",
    type=click.Path(path_type=Path),
    help="aiperf: its command. multiturn: vLLM's benchmark_serving_multi_turn.py.",
)
@click.option(
    "--stats-json-output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the rows as vLLM's multi-turn benchmark does; '{arm}' is replaced.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the run.  [default: bench-runs/NAME-TIME]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(**given: Any) -> None:
    """Measure what bidirectional transfer is worth on SPEC's deployment, or on any URL.

    Brings SPEC up with transfer off and on, offers both the same conversations, and prints a
    report (again: 'pdctl report FOLDER'). Exit code 1 when the evidence does not carry a
    comparison; the report says why.
    """
    interrupt_on_hangup()
    asked = Asked(**given)
    folder = asked.out or Path("bench-runs") / _run_name(asked.spec)
    with Progress(sys.stderr) as progress:
        if asked.client in ("aiperf", "multiturn"):
            run_other_client(asked, folder, progress.say)
        else:
            run_own_client(asked, folder, progress)
    run = one_run([folder])
    if asked.stats_json_output:
        write_stats(run, str(asked.stats_json_output))
    result = result_of(run)
    if asked.as_json:
        print_json(as_data(result))
    else:
        click.echo(as_text(result))
        click.echo(f"run: {folder} (pdctl report {folder} -o html)")
    sys.exit(result.code)


def _run_name(spec: Path | None) -> str:
    return f"{spec.stem if spec else 'url'}-{time.strftime('%Y%m%d-%H%M%S')}"
