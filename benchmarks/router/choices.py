"""What each part of the router's fast path is worth: the router as it is, without its native
part, and then with one more part exchanged for the usual one, under the same load in one run.

usage: python benchmarks/router/choices.py [--streams 64] [--seconds 8] [--rounds 2]
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from compare import run_load  # noqa: E402
from rig import engine, pd_router, process, wait_for  # noqa: E402

from ports import free_ports  # noqa: E402

VARIANTS = {
    "as it is": "",
    "without its native part": "python",
    "asyncio's loop, not uvloop": "loop",
    "json, not msgspec": "json",
    "every chunk parsed on its own": "parse",
    "a task and a queue between the sockets": "queue",
}
CHUNKS = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each; the median is told")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(*given.serve)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given, Path(folder))
    print("| router | events per CPU second | CPU ms per answer | first event p50 / p99 ms |")
    print("|---|---|---|---|")
    for name, found in rows.items():
        per_cpu = statistics.median(one["events_per_cpu_s"] for one in found)
        p50, p99 = (statistics.median(one[f"ttfb_{p}"] for one in found) for p in ("p50", "p99"))
        per_answer = 1000 * (CHUNKS + 2) / per_cpu
        print(f"| {name} | {per_cpu:.0f} | {per_answer:.2f} | {p50:.1f} / {p99:.1f} |")
    return 0


def measure(given: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    ports = free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    legs = [("prefill", urls[0]), ("decode", urls[1])]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    with process(engine(ports[0])), process(engine(ports[1])):
        for url in urls[:2]:
            wait_for(url + "/health")
        for _ in range(given.rounds):
            for name, variant in VARIANTS.items():
                # What is exchanged are parts of what there is without the native part.
                native = not variant
                config = pd_router(folder, ports[2], legs, log_level="warning", native=native)[-1]
                command = [sys.executable, __file__, "--serve", variant, config]
                with process(command) as router:
                    wait_for(urls[2] + "/health")
                    target = ["--url", urls[2]]
                    row = run_load(target, given.streams, given.seconds, CHUNKS, router.pid)
                rows[name].append(row)
    return rows


def serve(variant: str, config: str) -> int:
    """The router with parts exchanged."""
    from pd_router.__main__ import main as router  # noqa: PLC0415

    exchange = {"loop": use_asyncio, "json": use_json, "parse": parse_each, "queue": use_queue}
    if variant in exchange:
        exchange[variant]()
    return router(["--config", config])


def use_asyncio() -> None:
    import uvloop  # noqa: PLC0415

    uvloop.run = asyncio.run


def use_json() -> None:
    import json  # noqa: PLC0415

    from pd_router import jsonbytes  # noqa: PLC0415

    def dump(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    jsonbytes.load, jsonbytes.dump = json.loads, dump


def parse_each() -> None:
    from pd_router.relay import StreamRelay  # noqa: PLC0415

    StreamRelay._is_special = lambda self, chunk: True  # type: ignore[method-assign]


def use_queue() -> None:
    """A chunk waits in a queue, and a task writes it: what an HTTP client's and server's usual
    streaming interfaces do."""
    from pd_router import pipe  # noqa: PLC0415
    from pd_router.engines import failed  # noqa: PLC0415

    async def run(self: Any) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._engine.attach(queue.put_nowait)
        self._engine.end.add_done_callback(lambda end: queue.put_nowait(None))
        while (piece := await queue.get()) is not None:
            if events := self._relay.feed(piece):
                await self._writer.write(events)
        try:
            await self._engine.end
        except (asyncio.TimeoutError, OSError) as error:
            raise failed(self._answer.leg, error) from error

    pipe.StreamPipe.run = run  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
