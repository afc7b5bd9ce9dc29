"""Whether AIPerf and pdctl's client see the same time to first token.

Both send the same conversations, one at a time, to a router that runs; they take turns, and each
round has new conversations. Beside each client's own times stands what the router measured of the
same requests, so that it can be told where a difference is: in the clients' clocks, or in what they
were served.

usage: python benchmarks/bench/clients.py --url http://127.0.0.1:8000 --router-log FILE
           --tokenizer FOLDER --aiperf PROGRAM [--rounds N] [--conversations N] [--turns N] [-o OUT]
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from pdctl.bench.records import Row, load_run
from pdctl.bench.stats import ratio
from pdctl.bench.words import fresh_text

CLIENTS = ("aiperf", "http")
AGREEMENT = 0.05
LINE = re.compile(r" ttft_ms=([0-9.]+) prompt_tokens=([0-9]+) ")
PDCTL = Path(sys.executable).with_name("pdctl")


@dataclass(frozen=True)
class Turn:
    """A measured turn, and the router's time to first token of it in ms."""

    row: Row
    served_ms: float

    @property
    def ttft_ms(self) -> float:
        return self.row.ttft_ms or 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the router")
    parser.add_argument("--router-log", type=Path, required=True, help="what it writes")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's folder")
    parser.add_argument("--aiperf", required=True, help="its program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--characters", type=int, default=900, help="of every user message")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("-o", "--out", type=Path, help="folder for the runs")
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="clients-"))
    turns: dict[str, list[Turn]] = {client: [] for client in CLIENTS}
    for number in range(given.rounds):
        for client in CLIENTS if number % 2 == 0 else reversed(CLIENTS):
            folder = out / f"{number}-{client}"
            before = given.router_log.stat().st_size
            run(given, client, folder)
            found = beside_the_router(load_run(folder).rows, given.router_log, before)
            turns[client] += [turn for turn in found if not turn.row.warmup]
            print(f"{folder.name}: {len(found)} turns", file=sys.stderr)
    return tell(turns)


def run(given: argparse.Namespace, client: str, folder: Path) -> None:
    """The same load from one of them."""
    folder.mkdir(parents=True)
    trace = folder / "trace.json"
    trace.write_text(json.dumps(conversations(given)))
    words = [
        PDCTL, "bench", "--client", client, "--url", given.url, "--trace", trace,
        "--answer-tokens", given.answer_tokens, "--tokenizer", given.tokenizer,
        "--repeats", 1, "--no-salt", "-o", folder,
    ]  # fmt: skip
    if client == "aiperf":
        words += ["--program", given.aiperf]
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{client} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def conversations(given: argparse.Namespace) -> list[dict[str, object]]:
    return [
        {
            "id": f"c{number}",
            "messages": [
                message
                for _ in range(given.turns)
                for message in (
                    {"role": "user", "content": fresh_text(uuid.uuid4().hex, given.characters)},
                    {"role": "assistant", "content": "x"},
                )
            ],
        }
        for number in range(given.conversations)
    ]


def beside_the_router(rows: list[Row], log: Path, begin: int) -> list[Turn]:
    """Each turn with the router's line of it: they came one after the other."""
    with log.open("rb") as stream:
        stream.seek(begin)
        lines = LINE.findall(stream.read().decode(errors="replace"))
    ordered = sorted(rows, key=lambda row: row.started_at)
    if [row.prompt_tokens for row in ordered] != [int(tokens) for _, tokens in lines]:
        raise SystemExit(f"{log}: its turns are not the ones that were sent")
    return [Turn(row, float(ms)) for row, (ms, _) in zip(ordered, lines, strict=True)]


def tell(turns: dict[str, list[Turn]]) -> int:
    """Print the comparison; 1 when a client's clock and the router's are further apart on the same
    requests than they may be."""
    print(f"{'turn':>4} {'prompt':>7} {'n':>3}", end="")
    for client in CLIENTS:
        print(f" {client + ' ms':>10} {'router ms':>10} {'ratio':>6}", end="")
    print("  aiperf / http (95 %)")
    apart = False
    for number in sorted({turn.row.turn for turn in turns["http"]}):
        both = [[turn for turn in turns[client] if turn.row.turn == number] for client in CLIENTS]
        prompts = {turn.row.prompt_tokens for each in both for turn in each}
        print(f"{number:>4} {'/'.join(map(str, prompts)):>7} {len(both[0]):>3}", end="")
        for each in both:
            share = statistics.median(turn.ttft_ms / turn.served_ms for turn in each)
            apart = apart or abs(share - 1) > AGREEMENT
            seen = statistics.median(turn.ttft_ms for turn in each)
            served = statistics.median(turn.served_ms for turn in each)
            print(f" {seen:>10.1f} {served:>10.1f} {share:>6.3f}", end="")
        told = ratio(*[[turn.ttft_ms for turn in each] for each in both], f"turn {number}")
        print("" if told is None else f"  {told.value:.3f} ({told.low:.3f} to {told.high:.3f})")
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
