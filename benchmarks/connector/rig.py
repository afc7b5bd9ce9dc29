"""A prefill and a decode leg on this machine for the connector's benchmarks, made of
examples/laptop.yaml and driven without a router."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pd_connector import contract
from pd_connector.secret import lease_key

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.ports import free_ports  # noqa: E402

PDCTL = Path(sys.executable).with_name("pdctl")
LETTERS = "abcdefghijklmnopqrstuvwxyz      "
FRESH = {contract.DO_REMOTE_DECODE: True, contract.DO_REMOTE_PREFILL: False}
"""What prefill is asked with when there is no handle."""
ALONE = {contract.DO_REMOTE_DECODE: False, contract.DO_REMOTE_PREFILL: False}


@dataclass
class Pair:
    """Two engines that run. ``state`` is where pdctl keeps what belongs to them."""

    name: str
    prefill: str
    decode: str
    spec: Path
    state: Path

    def key(self) -> dict[str, str]:
        """Headers that open decode's leases; none where there is no secret."""
        secret = self.state / self.name / "secret"
        if not secret.exists():
            return {}
        return {contract.LEASE_KEY_HEADER: lease_key(secret.read_bytes().strip())}

    def pdctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return _pdctl(self.state, *words)

    def pid(self, leg: str) -> int:
        """The leader of a leg's process group."""
        for line in yaml.safe_load(self.pdctl("status", self.name, "--json").stdout)["legs"]:
            if line["name"] == leg:
                return int(line["pid"])
        raise LookupError(leg)

    def log(self, leg: str) -> str:
        """Empty before the leg's first start."""
        file = self.state / self.name / f"{leg}.log"
        return file.read_text(errors="replace") if file.exists() else ""


@contextlib.contextmanager
def pair(changes: Mapping[str, Mapping[str, Any]], seconds: int = 400) -> Iterator[Pair]:
    """Both legs, healthy; ``changes`` to the example's spec by section. Stopped at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    folder = Path(tempfile.mkdtemp(prefix="pdctl-bench-"))
    prefill, decode, router, side_p, side_d = free_ports(5)
    spec = yaml.safe_load((ROOT / "examples/laptop.yaml").read_text())
    spec["name"] = f"bench-{random.randrange(16**6):06x}"
    spec["model"]["id"] = str(ROOT / ".cache/canary")
    spec["engine"] |= {"venv": None, "python": sys.executable}
    spec["prefill"]["legs"][0] |= {"port": prefill, "side_channel_port": side_p}
    spec["decode"]["legs"][0] |= {"port": decode, "side_channel_port": side_d}
    spec["router"]["port"] = router
    for section, values in changes.items():
        spec[section] |= values
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    urls = (f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}")
    made = Pair(spec["name"], *urls, file, folder / "state")
    try:
        started = made.pdctl("up", str(file), "--skip-checks", "--timeout", str(seconds))
        if started.returncode:
            raise SystemExit(f"the legs did not start:\n{started.stderr}")
        yield made
    except BaseException:
        for leg in ("prefill-0", "decode-0"):
            print(f"--- end of {leg}'s log\n{tail(made.log(leg))}", file=sys.stderr, flush=True)
        raise
    finally:
        made.pdctl("down", made.name, "--grace", "10")
        shutil.rmtree(folder)


def tail(log: str, lines: int = 60) -> str:
    """The last lines of a log that say something."""
    told = [line for line in log.splitlines() if line.strip() and ' HTTP/1.1" 200' not in line]
    return "\n".join(line[:400] for line in told[-lines:])


def _pdctl(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PDCTL), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PDCTL_STATE_DIR": str(state)},
        check=False,
    )


def text_of(seed: object, characters: int) -> str:
    """Text that no other seed has."""
    source = random.Random(str(seed))
    return "".join(source.choice(LETTERS) for _ in range(characters))


class Metrics:
    """The samples of an engine at one moment."""

    def __init__(self, text: str) -> None:
        self._samples = [s for f in text_string_to_metric_families(text) for s in f.samples]

    def __call__(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= dict(sample.labels).items()
        )


async def metrics(client: httpx.AsyncClient, url: str) -> Metrics:
    return Metrics((await client.get(f"{url}/metrics")).text)


async def complete(
    client: httpx.AsyncClient, url: str, prompt: str, tokens: int, params: Any = None, **more: Any
) -> dict[str, Any]:
    """A completion. Raises httpx.HTTPStatusError for one that is refused."""
    body: dict[str, Any] = {
        "model": "canary",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    if params is not None:
        body[contract.KV_TRANSFER_PARAMS] = params
    headers = body.pop("headers", None)
    response = await client.post(f"{url}/v1/completions", json=body, headers=headers)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


async def until(what: str, holds: Any, seconds: float = 60.0) -> float:
    """Seconds until the coroutine function ``holds`` is true; inf when it is not in time."""
    started = time.monotonic()
    while not await holds():
        if time.monotonic() - started > seconds:
            print(f"  not within {seconds:g} s: {what}", flush=True)
            return float("inf")
        await asyncio.sleep(0.1)
    return time.monotonic() - started


def quantile(values: list[float], share: float) -> float:
    """Value below which ``share`` of the values lie; nan of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")
