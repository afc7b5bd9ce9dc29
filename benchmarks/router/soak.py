"""A long load with clients that leave, clients that read slowly and legs that restart.

Two fake legs of each role, one router, one process of clients. Every few seconds the router is
looked at; at the end the load stops and what is left is looked at again. Fails (exit 1) if a
request ended in anything but a whole answer, an error event or an error answer, or if memory,
sockets, tasks or handles grew from the middle of the run to its end.

usage: python benchmarks/router/soak.py [--seconds 600] [--streams 256] [-o json]
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from rig import cpu_seconds, engine, pd_router, process, wait_for  # noqa: E402

from ports import free_ports  # noqa: E402

LEAVES, SLOW = 0.1, 0.05
"""Shares of requests whose client leaves in the midst, or reads slowly."""
CHUNKS = 100
RESTART_SECONDS = 15.0
LOOK_SECONDS = 5.0
GROWTH = 1.05
SLACK = {"rss_mb": 8.0, "fds": 30, "tasks": 40, "handles": 500}
"""What a measure may grow by besides; clients come and go."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("-o", dest="output", choices=("table", "json"), default="table")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        print(json.dumps(uvloop.run(clients(given.client, given.streams, given.seconds))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = soak(given, Path(folder))
    print(json.dumps(result) if given.output == "json" else table(result))
    return 1 if result["problems"] else 0


def soak(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    ports = free_ports(5)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    legs = [("prefill", urls[0]), ("prefill", urls[1]), ("decode", urls[2]), ("decode", urls[3])]
    settings = {"handle_ttl": 60, "decode_ttl": 90, "max_handles": 4000, "log_level": "warning"}
    command = pd_router(folder, ports[4], legs, **settings)
    with contextlib.ExitStack() as stack:
        for port in ports[:4]:
            stack.enter_context(process(engine(port, "--chunk-ms", "40")))
        for url in urls[:4]:
            wait_for(url + "/health")
        router = stack.enter_context(process(command))
        wait_for(urls[4] + "/health")
        looks, endings = watch(given, urls, router.pid)
        time.sleep(10)
        left = look(urls[4], router.pid, 0)
    return judge(looks, endings, left)


def watch(
    given: argparse.Namespace, urls: list[str], pid: int
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Looks at the router while clients ask it and legs restart."""
    command = [sys.executable, __file__, "--client", urls[4]]
    command += ["--seconds", str(given.seconds), "--streams", str(given.streams)]
    looks, began, restarts = [], time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        while client.poll() is None:
            passed = time.monotonic() - began
            if passed < given.seconds:
                looks.append(look(urls[4], pid, passed))
                print(json.dumps(looks[-1]), file=sys.stderr, flush=True)
            if passed // RESTART_SECONDS > restarts:
                restarts += 1
                restart(urls[restarts % 4])
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(LOOK_SECONDS)
        assert client.stdout is not None
        endings: dict[str, int] = json.loads(client.stdout.read())
    endings["leg restarts"] = restarts
    return looks, endings


def restart(url: str) -> None:
    """The leg drops its connections and its blocks and has a new engine id."""
    request = urllib.request.Request(url + "/fake/restart", data=b"", method="POST")
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request, timeout=5).close()


def look(url: str, pid: int, seconds: float) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    rss = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    with urllib.request.urlopen(url + "/admin/process", timeout=30) as answer:
        inside = json.load(answer)
    return {
        "seconds": round(seconds),
        "rss_mb": round(rss, 1),
        "fds": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "tasks": inside["tasks"],
        "streams": inside["streams"],
        "handles": inside["handles"],
        "cpu_s": round(cpu_seconds(pid), 1),
    }


def judge(
    looks: list[dict[str, float]], endings: dict[str, int], left: dict[str, float]
) -> dict[str, Any]:
    count = len(looks)
    middle, end = looks[count * 2 // 5 : count * 3 // 5], looks[count * 4 // 5 :]
    problems = [f"{n} requests ended badly" for n in [endings["bad"]] if n]
    for name, slack in SLACK.items():
        before = statistics.median(one[name] for one in middle)
        after = statistics.median(one[name] for one in end)
        if after > before * GROWTH + slack:
            problems.append(f"{name} grew from {before:g} to {after:g}")
    if left["streams"] or left["tasks"] > looks[0]["tasks"] + 10:
        problems.append(f"after the end: {left}")
    return {"looks": looks, "endings": endings, "left": left, "problems": problems}


def table(result: dict[str, Any]) -> str:
    names = list(result["looks"][0])
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    step = max(len(result["looks"]) // 12, 1)
    rows = [*result["looks"][::step], {**result["left"], "seconds": "after"}]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    lines += [f"{name}: {count}" for name, count in result["endings"].items()]
    return "\n".join([*lines, *(f"PROBLEM {text}" for text in result["problems"])])


# The clients.


async def clients(url: str, streams: int, seconds: float) -> dict[str, int]:
    endings: Counter[str] = Counter(
        {"whole": 0, "error event": 0, "error answer": 0, "left": 0, "slow": 0, "bad": 0}
    )
    until = time.monotonic() + seconds
    runs = (client(url, number, until, endings) for number in range(streams))
    await asyncio.gather(*runs)
    return dict(endings)


async def client(url: str, number: int, until: float, endings: Counter[str]) -> None:
    dice = random.Random(number)
    await asyncio.sleep(dice.random() * 4)
    turn = 0
    messages: list[dict[str, str]] = []
    while time.monotonic() < until:
        if turn % 4 == 0:
            messages = [{"role": "user", "content": f"Client {number}. " + "lorem ipsum " * 60}]
        body = {"model": "fake", "messages": messages, "stream": True, "max_tokens": CHUNKS}
        body["conversation_id"] = f"c{number}-{turn // 4}"
        turn += 1
        ending = await ask(url, json.dumps(body).encode(), dice)
        endings[ending] += 1
        answer = " token" * (CHUNKS - 1) + " end"
        messages = [*messages, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": "And then?"})
        if ending == "error answer":
            await asyncio.sleep(0.5)


async def ask(url: str, body: bytes, dice: random.Random) -> str:
    """How one request ended."""
    leaves = dice.random() < LEAVES
    slow = not leaves and dice.random() < SLOW
    most = dice.randrange(1, 20_000) if leaves else None
    parts = urlsplit(url)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        got = await take(reader, most, slow)
        if leaves and not got.endswith(b"\r\n0\r\n\r\n"):
            writer.transport.abort()
            return "left"
        writer.close()
    except OSError:
        return "bad"
    return ending_of(got, slow)


async def take(reader: asyncio.StreamReader, most: int | None, slow: bool) -> bytes:
    got = b""
    while most is None or len(got) < most:
        piece = await asyncio.wait_for(reader.read(2048 if slow else 65536), 120)
        if not piece:
            break
        got += piece
        if slow:
            await asyncio.sleep(0.3)
    return got


def ending_of(got: bytes, slow: bool) -> str:
    if not got.startswith(b"HTTP/1.1 200"):
        return "error answer" if got.startswith(b"HTTP/1.1 5") and b'"error"' in got else "bad"
    if not got.endswith(b"\r\n0\r\n\r\n"):
        return "bad"
    if b"kv_transfer_params" in got or b"remote_" in got:
        return "bad"
    if b"data: [DONE]" in got:
        return "slow" if slow else "whole"
    return "error event" if b'"error"' in got else "bad"


if __name__ == "__main__":
    sys.exit(main())
