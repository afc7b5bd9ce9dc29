"""CPU time of pdctl's short commands against their limits; exits 1 when one is over.

usage: python benchmarks/cli.py [-n RUNS]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LAPTOP = Path(__file__).parents[1] / "examples" / "laptop.yaml"
PDCTL = Path(sys.executable).with_name("pdctl")


@dataclass(frozen=True)
class Case:
    name: str
    args: list[str]
    limit: float | None
    """CPU seconds, user and system together."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=7, metavar="RUNS", help="runs of each (7)")
    runs = parser.parse_args().n
    over = False
    print(f"{'command':<24} {'CPU s':>7} {'limit':>6}   median of {runs}, slowest")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder)):
            seconds = [cpu_seconds(case.args) for _ in range(runs)]
            median = statistics.median(seconds)
            too_slow = case.limit is not None and median > case.limit
            over |= too_slow
            print(
                f"{case.name:<24} {median:7.3f} {case.limit or '-':>6}   {max(seconds):.3f}"
                f"{'   OVER' if too_slow else ''}"
            )
    return 1 if over else 0


def cases(folder: Path) -> list[Case]:
    large = folder / "large.yaml"
    large.write_text(large_spec(32))
    return [
        Case("--help", ["--help"], 0.3),
        Case("validate laptop", ["validate", str(LAPTOP)], None),
        Case("render laptop", ["render", str(LAPTOP), "-o", str(folder / "laptop")], 0.5),
        Case("validate 64 legs", ["validate", str(large)], None),
        Case("render 64 legs", ["render", str(large), "-o", str(folder / "large")], 2.0),
    ]


def large_spec(of_each: int) -> str:
    def legs(role: str, port: int) -> str:
        return f"{role}:\n  tensor_parallel: 8\n  legs:\n" + "".join(
            f"    - host: {role}-{n}\n      port: {port}\n      env: {{UCX_NET_DEVICES: all}}\n"
            for n in range(of_each)
        )

    return (
        "name: large\nmodel: {id: org/model, max_model_len: 32768}\n"
        "kv_transfer: {backend: UCX}\n" + legs("prefill", 8100) + legs("decode", 8200)
    )


def cpu_seconds(args: list[str]) -> float:
    with subprocess.Popen([PDCTL, *args], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"pdctl {' '.join(args)}: exit {process.returncode}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
