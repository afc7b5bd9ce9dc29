"""How fast pdctl doctor reads logs: megabytes per CPU-second and peak memory, against its limits.

usage: python benchmarks/doctor/scan.py [--size GB] [--folder FOLDER]

Three logs of the given size (2 GB): what a loaded engine writes (access lines, statistics, now and
then an expiry or a failure), one with debug lines of NIXL, and one that is bad news in every tenth
line, each of which has to be looked at. Each is read by `pdctl doctor --bundle`, all checks. Exits
1 when one is slower than its limit or memory grows with the log.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PDCTL = Path(sys.executable).with_name("pdctl")
LEAST_MB_PER_CPU_SECOND = {
    "a loaded engine": 150.0,
    "debug lines": 150.0,
    "every tenth line bad": 150.0,
}
MOST_MEMORY_MB = 400.0
_BLOCK_LINES = 20_000


def access(draw: random.Random) -> str:
    port = draw.randint(30000, 60000)
    return (
        f'(APIServer pid=12) INFO:     10.0.0.{draw.randint(1, 250)}:{port} - "POST '
        '/v1/chat/completions HTTP/1.1" 200 OK'
    )


def statistics(draw: random.Random) -> str:
    return (
        "(APIServer pid=12) INFO 11-30 12:00:00 [loggers.py:271] Engine 000: Avg prompt "
        f"throughput: {draw.random() * 9000:.1f} tokens/s, Avg generation throughput: "
        f"{draw.random() * 900:.1f} tokens/s, Running: {draw.randint(0, 8)} reqs, "
        f"Waiting: {draw.randint(0, 3)} reqs, GPU KV cache usage: {draw.random() * 90:.1f}%, "
        "Prefix cache hit rate: 41.2%"
    )


def transfers(draw: random.Random) -> str:
    return (
        "(APIServer pid=12) INFO 11-30 12:00:00 [metrics.py:103] KV Transfer metrics: Num "
        f"successful transfers={draw.randint(1, 40)}, Avg xfer time (ms)=8.871, P90 xfer time "
        "(ms)=10.504, Avg post time (ms)=2.538, P90 post time (ms)=3.681, "
        "Avg MB per transfer=5.667, Throughput (MB/s)=638.762, Avg number of descriptors=64.0"
    )


def expiry(draw: random.Random) -> str:
    return (
        "(Worker_TP0 pid=312) WARNING 11-30 12:00:00 [base_worker.py:2319] Releasing expired KV "
        f"blocks for request chatcmpl-{draw.getrandbits(64):x} which were retrieved by 0 remote "
        "worker(s) before lease expired."
    )


def failure(draw: random.Random) -> str:
    return (
        "(Worker_TP0 pid=312) ERROR 11-30 12:00:00 [base_worker.py:2398] NIXL transfer failure: "
        f"transfer_failed | Context: {{'request_id': 'cmpl-{draw.getrandbits(64):x}', 'engine_id': "
        "'decode-001', 'remote_engine_id': 'prefill-001', 'remote_host': '10.0.0.11'}}"
    )


def debug(draw: random.Random) -> str:
    return (
        f"I1130 12:00:00.{draw.randint(0, 999999):06d}     301 libfabric_rail.cpp:755] posting "
        f"read xfer_id={draw.getrandbits(32)} rail={draw.randint(0, 15)} length=262144 offset="
        f"{draw.getrandbits(30)}"
    )


MIXES = {
    "a loaded engine": [
        (access, 880),
        (statistics, 90),
        (transfers, 25),
        (expiry, 4),
        (failure, 1),
    ],
    "debug lines": [(debug, 950), (access, 40), (transfers, 9), (expiry, 1)],
    "every tenth line bad": [(access, 900), (expiry, 50), (failure, 50)],
}


def write_log(path: Path, mix: list[tuple[object, int]], size: int) -> None:
    """Blocks of lines in another order each time, until the size is reached."""
    draw = random.Random(7)
    makers = [maker for maker, _ in mix]
    weights = [weight for _, weight in mix]
    lines = [maker(draw) for maker in draw.choices(makers, weights, k=_BLOCK_LINES)]  # type: ignore
    with path.open("wb") as log:
        while log.tell() < size:
            draw.shuffle(lines)
            log.write(("\n".join(lines) + "\n").encode())


def measure(folder: Path) -> tuple[float, float, float, int]:
    """(seconds, CPU seconds, peak MB, findings) of doctor reading a bundle."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (folder.parent / "out.json").open("w") as out:
        process = subprocess.Popen(
            [str(PDCTL), "doctor", "--bundle", str(folder), "-o", "json"], stdout=out
        )
        _, _, usage = os.wait4(process.pid, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = json.loads((folder.parent / "out.json").read_text())
    return time.monotonic() - begin, cpu, usage.ru_maxrss / 1024, len(report["findings"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=2.0, metavar="GB")
    parser.add_argument("--folder", type=Path, help="where the logs are written (a temp folder)")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bundle = Path(folder, "bundle")
        (bundle / "decode-0").mkdir(parents=True)
        log = bundle / "decode-0" / "log.txt"
        log.write_text("nothing\n")
        _, base, memory, _ = measure(bundle)
        print(f"{'log':<24} {'MB':>6} {'s':>7} {'CPU s':>7} {'MB/CPU s':>9} {'peak MB':>8} found")
        print(f"{'an empty one':<24} {0:6} {'':>7} {base:7.2f} {'':>9} {memory:8.0f}")
        for name, mix in MIXES.items():
            write_log(log, mix, int(args.size * 1e9))  # type: ignore[arg-type]
            megabytes = log.stat().st_size / 1e6
            seconds, cpu, memory, found = measure(bundle)
            rate = megabytes / cpu
            bad = rate < LEAST_MB_PER_CPU_SECOND[name] or memory > MOST_MEMORY_MB
            failed |= bad
            print(
                f"{name:<24} {megabytes:6.0f} {seconds:7.1f} {cpu:7.2f} {rate:9.0f} {memory:8.0f} "
                f"{found}{'  OVER' if bad else ''}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
