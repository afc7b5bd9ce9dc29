"""pdctl tune"""

import dataclasses
import sys
import time
import uuid
from pathlib import Path

import click

from pdctl.bench.records import RunFolder, load_run
from pdctl.bench.report.text import number
from pdctl.bench.run import Options, Runner, new_settings
from pdctl.bench.ttl import gaps_in
from pdctl.bench.tune import ARMS, READS, Advice, advise, for_measuring, tuned_spec, tuning_load
from pdctl.cli.bench_place import about_spec, deployment_place
from pdctl.cli.common import interrupt_on_hangup, print_json, read_spec
from pdctl.cli.progress import Progress
from pdctl.errors import PdctlError


@click.command("tune")
@click.argument("what", metavar="SPEC|RUN", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--gaps",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Seconds between the turns of real conversations, one number a line.",
)
@click.option(
    "--turns-per-second",
    type=click.FloatRange(0, min_open=True),
    help="Expected on one decode leg; bounds decode_ttl by its KV memory.",
)
@click.option("--reads", help="Tokens to read back, e.g. 32,64,128.  [default: 64 to 4096]")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--timeout", type=click.FloatRange(min=1), default=900.0, show_default=True)
@click.option(
    "--run",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the measurements.  [default: bench-runs/tune-NAME-TIME]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The changed spec.  [default: NAME.tuned.yaml beside SPEC]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    what: Path,
    gaps: Path | None,
    turns_per_second: float | None,
    reads: str | None,
    repeats: int,
    timeout: float,
    folder: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Recommend recompute_threshold and decode_ttl, and write them into a copy of the spec.

    Given a SPEC, brings it up and measures what computing and reading cost; given the folder of a
    run, takes its rows.
    """
    interrupt_on_hangup()
    think_times = gaps_in(gaps) if gaps else []
    if what.is_dir():
        run_folder = what
        spec_file = what / "spec.yaml"
    else:
        spec_file = what
        run_folder = folder or Path("bench-runs") / (
            f"tune-{what.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        _measure(what, run_folder, _reads(reads), repeats, timeout)
    advice = advise(load_run(run_folder), think_times, turns_per_second)
    written = None
    if spec_file.is_file():
        # Not what it was measured with, which lets even the smallest read happen.
        advice = dataclasses.replace(advice, now=about_spec(read_spec(spec_file))["about"])
        written = _write(spec_file, output, advice)
    if as_json:
        print_json(
            dataclasses.asdict(advice) | {"run": str(run_folder), "spec": str(written or "")}
        )
    else:
        _print(advice)
        if written:
            click.echo(f"written: {written}")
    sys.exit(0 if advice.threshold is not None else 1)


def _reads(text: str | None) -> tuple[int, ...]:
    try:
        return READS if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PdctlError(f"--reads: {text!r} is no list such as 64,128,256", 2) from None


def _measure(
    spec_file: Path, folder: Path, reads: tuple[int, ...], repeats: int, timeout: float
) -> None:
    loaded = read_spec(spec_file)
    loaded = dataclasses.replace(loaded, spec=for_measuring(loaded.spec))
    options = Options(
        workload=tuning_load(reads, loaded.spec.model.max_model_len),
        arms=ARMS,
        repeats=repeats,
        seed=uuid.uuid4().hex[:10],
        command=f"pdctl tune {spec_file}",
        extra=about_spec(loaded),
    )
    settings = new_settings(options, loaded.spec.name)
    out = RunFolder(folder)
    out.create(settings, spec_file.read_text(encoding="utf-8"))
    with Progress(sys.stderr) as progress:
        place = deployment_place(loaded, spec_file.parent, timeout, progress, False, False)
        Runner(options, place, out, progress.say).go(settings)


def _write(spec_file: Path, output: Path | None, advice: Advice) -> Path:
    path = output or spec_file.with_name(f"{spec_file.stem}.tuned.yaml")
    spec = read_spec(spec_file).spec
    text = tuned_spec(spec_file.read_text(encoding="utf-8"), advice, spec)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PdctlError(f"{path}: {error.strerror}", 2) from None
    read_spec(path)
    return path


def _print(advice: Advice) -> None:
    fit = advice.fit
    computed, read = fit.points
    per_1k = fit.compute_ms_per_1k
    click.echo(
        f"computing: {number(per_1k.value)} ms per 1,000 tokens ({number(per_1k.low)} to "
        f"{number(per_1k.high)}), from {computed} prompts up to {fit.longest:,} tokens"
    )
    told = "" if fit.read_ms_per_1k is None else f"; the read alone {fit.read_ms_per_1k:.2f}"
    click.echo(
        f"reading: {number(fit.costs.reuse[0])} ms and {1000 * fit.costs.reuse[1]:.2f} ms per "
        f"1,000 tokens{told}, from {read} turns"
    )
    for tokens, saved in fit.measured:
        click.echo(
            f"  reading {tokens:>6,} tokens saves {saved.value:>8.1f} ms "
            f"({saved.low:.1f} to {saved.high:.1f})"
        )
    now = advice.now.get("recompute_threshold")
    if advice.threshold is None or fit.break_even is None:
        click.echo(
            f"recompute_threshold: reading never paid up to {fit.longest:,} tokens: better leave "
            "bidirectional off"
        )
    else:
        even = fit.break_even
        click.echo(
            f"recompute_threshold: {advice.threshold} (now {now}); reading is faster from "
            f"{even.value:.0f} tokens on (95 %: {even.low:.0f} to {even.high:.0f})"
        )
        if even.value < fit.shortest_read:
            click.echo(f"  below the shortest read that was measured, {fit.shortest_read} tokens")
        click.echo(
            f"expected gain: {number(advice.gain_ms)} ms of prefill when {advice.gain_tokens:,} "
            "tokens are read"
        )
    if advice.ttl is None:
        click.echo(
            "decode_ttl: left as it is; --gaps FILE with the seconds between real turns tells more"
        )
    else:
        ttl = advice.ttl
        held = "" if ttl.pinned_share is None else f", holding {ttl.pinned_share:.0%} of its cache"
        bound = " (bounded by decode's KV memory)" if ttl.bound_by_memory else ""
        click.echo(
            f"decode_ttl: {ttl.seconds}s (now {advice.now.get('decode_ttl_s')}s) covers "
            f"{ttl.covered:.0%} of the gaps{held}{bound}"
        )
