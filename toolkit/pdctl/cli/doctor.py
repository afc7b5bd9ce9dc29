"""pdctl doctor"""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from pdctl.cli.common import print_json, read_plan, read_spec
from pdctl.doctor.checks import ALL
from pdctl.doctor.diagnose import of_bundles, of_deployment
from pdctl.doctor.model import SEVERITIES, Check
from pdctl.doctor.report import as_json, as_markdown, as_text, shown, summary
from pdctl.doctor.run import Diagnosis
from pdctl.doctor.select import chosen


@click.command("doctor")
@click.argument("spec", required=False, type=click.Path(path_type=Path))
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Evidence to read instead: a folder or a .tar.gz. Again for each further node.",
)
@click.option("--only", multiple=True, metavar="CATEGORY|CODE", help="Run these checks only.")
@click.option(
    "--fail-on",
    type=click.Choice(["warning", "error"]),
    default="error",
    show_default=True,
    help="Exit with 1 when something at least this bad is found.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
)
@click.option("--json", "as_json_", is_flag=True, help="Same as -o json.")
@click.option("--probe", is_flag=True, help="Also hold two turns through the router.")
@click.option("--conversations", type=click.IntRange(min=1), help="Size for this many at once.")
@click.option("--watch", is_flag=True, help="Repeat, and print what comes and goes.")
@click.option("--every", type=click.FloatRange(min=1), default=10.0, help="Seconds, with --watch.")
@click.option("-v", "--verbose", is_flag=True, help="Name every check that stayed unknown.")
def command(
    spec: Path | None,
    bundles: tuple[Path, ...],
    only: tuple[str, ...],
    fail_on: str,
    output: str,
    as_json_: bool,
    probe: bool,
    conversations: int | None,
    watch: bool,
    every: float,
    verbose: bool,
) -> None:
    """Say what is wrong with the deployment of SPEC, or with one whose evidence is in a bundle:
    how sure it is, on what evidence, and what to do.

    Nothing is changed. Exit code 0: nothing at or above --fail-on; 1: something; 2: it could not
    be tried.
    """
    output = "json" if as_json_ else output
    if spec is None and not bundles:
        raise click.UsageError("give a SPEC or --bundle")
    if bundles and (probe or watch):
        raise click.UsageError("--probe and --watch need a running deployment, not a bundle")
    if watch and output != "text":
        raise click.UsageError("--watch prints text only")
    checks = chosen(ALL, only)

    def look() -> Diagnosis:
        return _look(spec, bundles, checks, probe, conversations)

    subject = str(bundles[0]) if bundles else str(spec)
    if watch:
        _watch(look, subject, every)
    diagnosis = look()
    if output == "json":
        print_json(as_json(diagnosis, subject))
    elif output == "markdown":
        click.echo(as_markdown(diagnosis, subject))
    else:
        click.echo(as_text(diagnosis, subject, shutil.get_terminal_size().columns, verbose))
    worst = diagnosis.worst()
    failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    sys.exit(1 if worst in failing else 0)


def _look(
    path: Path | None,
    bundles: tuple[Path, ...],
    checks: list[Check],
    probe: bool,
    conversations: int | None,
) -> Diagnosis:
    if path is None:
        return of_bundles(bundles, checks, _say)
    if bundles:
        return of_bundles(bundles, checks, _say, read_spec(path).spec)
    loaded, deployment = read_plan(path)
    spec = loaded.spec
    if conversations:
        workload = spec.workload.model_copy(update={"conversations": conversations})
        spec = spec.model_copy(update={"workload": workload})
    text = path.read_text(encoding="utf-8", errors="replace")
    return of_deployment(deployment, spec, text, checks, _say, probe)


def _say(line: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line}", nl=False, err=True)


def _watch(look: Callable[[], Diagnosis], subject: str, every: float) -> None:
    known: dict[tuple[str, str], str] | None = None
    while True:
        diagnosis = look()
        now = {
            (each.check.code, each.finding.leg): (
                f"{each.severity} {each.check.code} {each.finding.leg}: {each.check.title}. "
                f"{shown(each.finding.fix)}"
            )
            for each in diagnosis.findings
        }
        stamp = time.strftime("%H:%M:%S")
        if known is None:
            click.echo(f"{stamp} {subject}: {summary(diagnosis)}")
        for key, line in now.items():
            if key not in (known or {}):
                click.echo(f"{stamp} found {line}")
        for key in known or {}:
            if key not in now:
                click.echo(f"{stamp} gone {key[0]} {key[1]}")
        known = now
        time.sleep(every)
