"""pd-router beside the engines called directly, a proxy that does nothing of a turn's own work
(``bare_proxy.py``) and, if it is there, ``vllm-router``.

Everything runs here on loopback, each in its own process. Before the measured seconds come
warm-up seconds; CPU is the router's own, from /proc.

With several rounds the medians are told, and the least and most that was added to p99.

usage: python benchmarks/router/compare.py [--streams 1 64 256] [--seconds 8] [--rounds 1]
           [--rust FOLDER] [--prefill-ms 5] [--chunks 100] [--chunk-ms 10] [-o json]
FOLDER is what ``pip install --target FOLDER vllm-router`` made.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGETS = ["direct", "bare", "pd-router", "vllm-router"]
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from rig import (  # noqa: E402
    bare_proxy,
    cpu_seconds,
    engine,
    pd_router,
    process,
    rust_router,
    wait_for,
)

from ports import free_ports  # noqa: E402


def run_load(
    target: list[str], streams: int, seconds: float, chunks: int, pid: int | None
) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "load.py"), *target]
    command += ["--streams", str(streams), "--seconds", str(seconds), "--chunks", str(chunks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdout is not None
        assert load.stdout.readline() == "warm\n"
        before = cpu_seconds(pid) if pid else 0.0
        assert load.stdout.readline() == "over\n"
        cpu = cpu_seconds(pid) - before if pid else 0.0
        row: dict[str, Any] = json.loads(load.stdout.readline())
    row["streams"] = streams
    if pid:
        row["cpu_s"] = cpu
        row["cores"] = cpu / seconds
        row["events_per_cpu_s"] = row["events"] / cpu if cpu else None
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rust", metavar="FOLDER", help="where vllm-router is installed")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--prefill-ms", type=float, default=5)
    parser.add_argument("--chunk-ms", type=float, default=10)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("-o", dest="output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as given.folder:
        rows = measure(given)
    print(json.dumps(rows) if given.output == "json" else table(rows))
    return 0


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    ports = free_ports(5)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    pace = ["--prefill-ms", str(given.prefill_ms), "--chunks", str(given.chunks)]
    pace += ["--chunk-ms", str(given.chunk_ms)]
    legs = [("prefill", urls[0]), ("decode", urls[1])]
    rounds: list[list[dict[str, Any]]] = []
    with process(engine(ports[0], *pace)), process(engine(ports[1], *pace)):
        for url in urls[:2]:
            wait_for(url + "/health")
        for streams in given.streams:
            for _ in range(given.rounds):
                rounds.append([])
                for name in given.only:
                    if name == "vllm-router" and not given.rust:
                        continue
                    one = _one(name, given, streams, ports, urls, legs)
                    rounds[-1].append({"target": name, **one})
                    print(json.dumps(rounds[-1][-1]), file=sys.stderr)
    for rows in rounds:
        _added(rows)
    return [
        _median([rows[number] for rows in rounds if rows[0]["streams"] == streams])
        for streams in given.streams
        for number in range(len(rounds[0]))
    ]


def _added(rows: list[dict[str, Any]]) -> None:
    """What each target adds to the direct way's times of the same round."""
    direct = [row for row in rows if row["target"] == "direct"]
    for row in rows:
        if direct and row["target"] != "direct":
            for part in ("p50", "p99"):
                row[f"added_{part}"] = row[f"ttfb_{part}"] - direct[0][f"ttfb_{part}"]


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    middle = {
        name: statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, int | float)
    }
    errors = {"errors": sum(sum(row["errors"].values()) for row in rows)}
    if "added_p99" in middle:
        added = [row["added_p99"] for row in rows]
        middle |= {"least_added_p99": min(added), "most_added_p99": max(added)}
    return {"target": rows[0]["target"], **middle, **errors}


def _one(
    name: str,
    given: argparse.Namespace,
    streams: int,
    ports: list[int],
    urls: list[str],
    legs: list[tuple[str, str]],
) -> dict[str, Any]:
    if name == "direct":
        return run_load(["--direct", urls[0], urls[1]], streams, given.seconds, given.chunks, None)
    env = {}
    if name == "pd-router":
        command, url = pd_router(Path(given.folder), ports[2], legs), urls[2]
    elif name == "bare":
        command, url = bare_proxy(ports[2], legs), urls[2]
    else:
        command, url = rust_router(given.rust, ports[3], ports[4], legs), urls[3]
        env = {"PYTHONPATH": given.rust}
    with process(command, env) as router:
        wait_for(url + "/health")
        row = run_load(["--url", url], streams, given.seconds, given.chunks, router.pid)
    row["answer_events"] = given.chunks + 2
    return row


def table(rows: list[dict[str, Any]]) -> str:
    head = ("target", "streams", "first event p50 / p99 ms", "added p50 / p99 (least, most) ms")
    head += ("answers/s", "events/s", "events/CPU-s", "CPU ms/answer", "cores", "errors")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in sorted(rows, key=lambda row: (row["streams"], row["target"])):
        added = "-"
        if "added_p50" in row:
            added = f"{row['added_p50']:.2f} / {row['added_p99']:.2f}"
            added += f" ({row['least_added_p99']:.2f}, {row['most_added_p99']:.2f})"
        cells = [row["target"], int(row["streams"])]
        cells += [f"{row['ttfb_p50']:.2f} / {row['ttfb_p99']:.2f}", added]
        cells += [f"{row['requests_per_s']:.1f}", f"{row['events_per_s']:.0f}"]
        if "cpu_s" in row:
            per_answer = 1000 * row["answer_events"] / max(row["events_per_cpu_s"], 1)
            cells += [f"{row['events_per_cpu_s']:.0f}", f"{per_answer:.2f}"]
            cells += [f"{row['cores']:.2f}"]
        else:
            cells += ["-", "-", "-"]
        cells.append(row["errors"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
