"""Whether AIPerf and pdctl's client see the same time to first token.

Both send the same conversations, one at a time, to a router that runs; they take turns, and each
round has new conversations. Beside each client's own times stands what the router measured of the
same requests, so that a difference can be told: in the clients, or in what they were served.

usage: python benchmarks/bench/clients.py --url http://127.0.0.1:8000 --tokenizer FOLDER
           --aiperf PROGRAM [--rounds N] [--conversations N] [--turns N] [-o FOLDER]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pd_connector import telemetry
from pdctl.bench.records import Row, load_run
from pdctl.bench.stats import ratio
from pdctl.bench.words import fresh_text

CLIENTS = ("aiperf", "http")
AGREEMENT = 0.05
PDCTL = Path(sys.executable).with_name("pdctl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the router")
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
    rows: dict[str, list[Row]] = {client: [] for client in CLIENTS}
    means: dict[str, list[tuple[float, float]]] = {client: [] for client in CLIENTS}
    for number in range(given.rounds):
        for client in CLIENTS if number % 2 == 0 else reversed(CLIENTS):
            folder = out / f"{number}-{client}"
            before = router_ttft(given.url)
            run(given, client, folder)
            after = router_ttft(given.url)
            found = [row for row in load_run(folder).rows if row.ttft_ms is not None]
            rows[client] += [row for row in found if not row.warmup]
            served = (after[0] - before[0]) * 1000 / (after[1] - before[1])
            means[client].append((statistics.fmean(row.ttft_ms or 0 for row in found), served))
            print(f"{folder.name}: {len(found)} turns", file=sys.stderr)
    return tell(rows, means)


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


def router_ttft(url: str) -> tuple[float, float]:
    """Sum in seconds, and number, of the first tokens that the router has passed on."""
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    found = {"_sum": 0.0, "_count": 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            ending = sample.name.removeprefix(telemetry.ROUTER_TTFT.name)
            if sample.name.startswith(telemetry.ROUTER_TTFT.name) and ending in found:
                found[ending] += sample.value
    return found["_sum"], found["_count"]


def tell(rows: dict[str, list[Row]], means: dict[str, list[tuple[float, float]]]) -> int:
    """Print the comparison; 1 when a later turn's medians are further apart than they may be."""
    print(f"{'turn':>4} {'prompt':>13} {'n':>7} {'AIPerf ms':>10} {'pdctl ms':>9}  ratio (95 %)")
    apart = False
    for turn in sorted({row.turn for row in rows["http"]}):
        both = [[row for row in rows[client] if row.turn == turn] for client in CLIENTS]
        prompts = ["/".join(sorted({str(row.prompt_tokens) for row in each})) for each in both]
        ttft = [[row.ttft_ms or 0.0 for row in each] for each in both]
        told = ratio(*ttft, f"turn {turn}")
        medians = [statistics.median(each) for each in ttft]
        said = "" if told is None else f"{told.value:.3f} ({told.low:.3f} to {told.high:.3f})"
        print(
            f"{turn:>4} {' '.join(dict.fromkeys(prompts)):>13} {len(ttft[0]):>3}/{len(ttft[1])} "
            f"{medians[0]:>10.1f} {medians[1]:>9.1f}  {said}"
        )
        apart = apart or abs(medians[0] / medians[1] - 1) > AGREEMENT
    for client in CLIENTS:
        seen, served = (statistics.fmean(values) for values in zip(*means[client], strict=True))
        print(
            f"{client}: mean TTFT {seen:.1f} ms at the client, {served:.1f} ms at the router: "
            f"{seen - served:.1f} ms ({seen / served - 1:.1%}) between them"
        )
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
