"""The benchmark on the real pair: a comparison that holds, and one that a warm cache spoils."""

import json
from pathlib import Path

import pytest

from .conftest import Deployment

pytestmark = pytest.mark.e2e_bench

LENGTHS = "1024,2048,3072,4096"


@pytest.fixture(scope="module")
def compared(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Off and on over the sweep; on is left running, also for the files that follow."""
    deployment.pdctl("down", deployment.name)
    out = tmp_path_factory.mktemp("bench") / "run"
    deployment.pdctl(
        "bench", "SPEC", "--lengths", LENGTHS, "--answer-tokens", "16", "--repeats", "3",
        "--timeout", "240", "--keep", "-o", str(out),
    )  # fmt: skip
    return out


def test_on_halves_prefill_and_answers_alike(deployment: Deployment, compared: Path) -> None:
    report = json.loads(deployment.pdctl("report", str(compared), "-o", "json").stdout)
    assert report["verdict"] == "VALID", report["problems"]
    longest = report["by_length"][-1]
    off, on = (longest["cells"][arm]["prefill"]["median"] for arm in ("off", "on"))
    assert on <= 0.5 * off
    assert longest["cells"]["on"]["tokens_read"] >= 2048
    rows = [json.loads(line) for line in (compared / "rows.jsonl").read_text().splitlines()]
    assert all(row["prompt_tokens"] == row["target_tokens"] for row in rows)
    reads = [row for row in rows if row["arm"] == "on" and row["turn"] > 1 and not row["warmup"]]
    assert all(row["read_bytes"] > 0 and row["read_ms"] > 0 for row in reads)


def test_a_replayed_seed_meets_a_warm_cache_and_is_told(
    deployment: Deployment, compared: Path, tmp_path: Path
) -> None:
    words = ("bench", "SPEC", "--attach", "--arms", "on", "--lengths", "256,512", "--repeats", "1",
             "--answer-tokens", "8", "--seed", "replayed", "--no-salt")  # fmt: skip
    deployment.pdctl(*words, "-o", str(tmp_path / "first"))
    again = deployment.pdctl(*words, "-o", str(tmp_path / "again"), "--json", ok=False)
    assert again.returncode == 1
    failed = [each for each in json.loads(again.stdout)["checks"] if each["ok"] is False]
    assert [each["name"] for each in failed] == ["cold caches"]
    assert "were in decode's cache already" in failed[0]["detail"]
