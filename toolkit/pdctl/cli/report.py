"""pdctl report"""

import json
import sys
from pathlib import Path

import click

from pdctl.bench.compare import one_run
from pdctl.bench.report.data import result_of
from pdctl.bench.report.export import as_csv, as_data
from pdctl.bench.report.markdown import as_markdown
from pdctl.bench.report.page import as_html
from pdctl.bench.report.text import as_text
from pdctl.bench.upstream import write_stats
from pdctl.errors import PdctlError


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "html", "md", "json", "png", "csv", "stats"]),
    default="text",
    show_default=True,
    help="stats: rows as vLLM's multi-turn benchmark writes them.",
)
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write it.  [default: report.EXT in RUN; json and csv go to the terminal]",
)
def command(runs: tuple[Path, ...], output: str, file: Path | None) -> None:
    """Show what a run found, or several one-armed runs (of equal load) against each other.

    RUN is a folder of pdctl bench, or a file of vLLM's multi-turn benchmark.

    Exit code 1 when a check fails or the evidence does not carry the comparison.
    """
    run = one_run(runs)
    folder = runs[0] if runs[0].is_dir() else runs[0].parent
    result = result_of(run)
    if output == "png":
        from pdctl.bench.report.png import write_png  # noqa: PLC0415

        path = file or folder / "report.png"
        write_png(result, path)
        click.echo(str(path))
        sys.exit(result.code)
    if output == "stats":
        for path in write_stats(run, str(file or folder / "stats-{arm}.json")):
            click.echo(str(path))
        sys.exit(result.code)
    text = {
        "text": as_text,
        "html": as_html,
        "md": as_markdown,
        "json": lambda found: json.dumps(as_data(found), indent=2) + "\n",
        "csv": as_csv,
    }[output](result)
    if file is None and output == "html":
        file = folder / "report.html"
    if file is None:
        click.echo(text.rstrip("\n"))
    else:
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PdctlError(f"{file}: {error.strerror}", 2) from None
        click.echo(str(file))
    sys.exit(result.code)
