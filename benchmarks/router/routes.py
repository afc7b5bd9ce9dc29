"""What the routes cost: time to first token of later turns, and what other streams feel of it.

On a running deployment whose legs it takes from a spec; it starts a router of its own per route,
pinned and free, one after the other.

usage: python benchmarks/router/routes.py SPEC [--prompt N] [--new N] [--turns N] [--streams N]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pd_connector import contract
from pdctl.conversation import user_text
from pdctl.plan import plan
from pdctl.spec import load

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.ports import free_ports

ROUTES = ("recompute", "readback", "append", "auto")
ANSWER_TOKENS = 24
STREAM_TOKENS = 400


@dataclass
class Seen:
    """Of one route. Milliseconds."""

    ttft: list[float] = field(default_factory=list)
    routes: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    """Between the tokens of the other streams."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--prompt", type=int, default=3000, help="characters of the first turn")
    parser.add_argument("--new", type=int, default=200, help="characters of every later turn")
    parser.add_argument("--turns", type=int, default=4, help="later turns of a conversation")
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--streams", type=int, default=1, help="other streams meanwhile")
    given = parser.parse_args()
    seen = {route: measure(given, route) for route in ROUTES}
    print(f"prompt {given.prompt}, new {given.new} characters, {given.streams} other stream(s)")
    print(f"{'route':<10} {'TTFT p50':>9} {'max':>7} {'TPOT p50':>9} {'p99':>7} {'max':>7}   ways")
    for route, one in seen.items():
        gaps = sorted(one.gaps) or [float("nan")]
        print(
            f"{route:<10} {statistics.median(one.ttft):>9.0f} {max(one.ttft):>7.0f} "
            f"{statistics.median(gaps):>9.1f} {gaps[int(0.99 * (len(gaps) - 1))]:>7.1f} "
            f"{gaps[-1]:>7.1f}   {one.routes} {one.outcomes}"
        )
    return 0


def measure(given: argparse.Namespace, route: str) -> Seen:
    seen = Seen()
    deployment = plan(load(given.spec).spec, given.spec.parent)
    with tempfile.TemporaryDirectory() as folder:
        config = deployment.router.config | {"port": free_ports(1)[0], "route": route}
        path = Path(folder) / "router.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "pd_router", "--config", str(path)]
        router = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{config['port']}/v1/chat/completions"
        stop = threading.Event()
        others = [
            threading.Thread(target=stream, args=(url, deployment.served_name, stop, seen.gaps))
            for _ in range(given.streams)
        ]
        try:
            wait_for(url)
            if route == "auto":
                for _ in range(2):  # It learns what its turns take.
                    converse(url, deployment.served_name, given, Seen())
            for other in others:
                other.start()
            time.sleep(1.0 if others else 0.0)
            for _ in range(given.conversations):
                converse(url, deployment.served_name, given, seen)
        finally:
            stop.set()
            for other in others:
                other.join()
            router.terminate()
            router.wait(30)
    return seen


def converse(url: str, model: str, given: argparse.Namespace, seen: Seen) -> None:
    name = uuid.uuid4().hex
    messages: list[dict[str, str]] = []
    with httpx.Client(timeout=300, trust_env=False) as client:
        for turn in range(given.turns + 1):
            text = user_text(f"{name}-{turn}", given.new if turn else given.prompt)
            messages.append({"role": "user", "content": text})
            body = {
                "model": model,
                "messages": messages,
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "stream": True,
                contract.CONVERSATION_ID: name,
            }
            begin, first, answer = time.perf_counter(), None, ""
            with client.stream("POST", url, json=body) as response:
                assert response.status_code == 200, response.read()
                for chunk in chunks(response):
                    content = chunk["choices"][0]["delta"].get("content")
                    if content and first is None:
                        first = time.perf_counter()
                    answer += content or ""
            messages.append({"role": "assistant", "content": answer})
            if turn and first is not None:
                seen.ttft.append((first - begin) * 1000)
                count(seen.routes, response.headers[contract.HEADER_ROUTE])
                count(seen.outcomes, response.headers.get(contract.HEADER_REUSE, "at its end"))


def stream(url: str, model: str, stop: threading.Event, gaps: list[float]) -> None:
    """Answers one after the other, and the time between their tokens."""
    with httpx.Client(timeout=300, trust_env=False) as client:
        while not stop.is_set():
            text = user_text(uuid.uuid4().hex, 100)
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": STREAM_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
            last = None
            with client.stream("POST", url, json=body) as response:
                for _ in chunks(response):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append((now - last) * 1000)
                    last = now
                    if stop.is_set():
                        return


def chunks(response: httpx.Response) -> Any:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def count(where: dict[str, int], what: str) -> None:
    where[what] = where.get(what, 0) + 1


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            httpx.get(url, timeout=5, trust_env=False)
            return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise SystemExit("the router does not listen")


if __name__ == "__main__":
    sys.exit(main())
