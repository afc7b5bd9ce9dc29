"""Thresholds and TTLs from measurements with a known answer."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdctl.bench.edit import with_value
from pdctl.bench.ttl import recommend_ttl
from pdctl.errors import PdctlError
from tests.bench.made_runs import MadeRun
from tests.cli import pdctl

ARMS = (
    {"name": "recompute", "bidirectional": True, "route": "recompute"},
    {"name": "readback", "bidirectional": True, "route": "readback"},
)
SPEC = """\
name: tuned   # stays
model: {id: m, max_model_len: 8192}
kv_transfer:
  # why this value
  recompute_threshold: 64
  backend: UCX
prefill:
  legs: [{host: 127.0.0.1, port: 8100}]
decode:
  legs: [{host: 127.0.0.1, port: 8200, side_channel_port: 5700}]
"""


def made(fixed: float, per_token: float, folder: Path) -> Path:
    """A run in which computing costs 0.5 ms a token and reading ``fixed + per_token * tokens``."""
    run = MadeRun(
        repeats=6,
        lengths=(128, 256, 512, 1024, 2048),
        compute_ms=lambda tokens: 5 + 0.5 * tokens,
        read_ms=lambda tokens: 5 + fixed + per_token * tokens,
    )
    for arm, route in (("off", "recompute"), ("on", "readback")):
        for line in (*run.rows, *run.blocks):
            line["arm"] = route if line["arm"] == arm else line["arm"]
    run.settings["arms"] = [dict(arm) for arm in ARMS]
    run.write(folder)
    (folder / "spec.yaml").write_text(SPEC)
    return folder


def test_the_threshold_is_where_reading_becomes_faster(tmp_path: Path) -> None:
    # 0.5 n = 100 + 0.1 n at 250 tokens.
    folder = made(100, 0.1, tmp_path / "run")
    settings = json.loads((folder / "run.json").read_text())
    settings["about"]["recompute_threshold"] = 1
    (folder / "run.json").write_text(json.dumps(settings))
    ended = pdctl("tune", folder, "-o", tmp_path / "new.yaml", "--json")
    advice = json.loads(ended.out)
    assert advice["now"]["recompute_threshold"] == 64
    even = advice["fit"]["break_even"]
    assert ended.code == 0
    assert even["low"] <= 250 <= even["high"]
    assert even["value"] == pytest.approx(250, rel=0.2)
    assert advice["threshold"] % 16 == 0
    assert 0 <= advice["threshold"] - even["value"] < 16
    assert advice["fit"]["compute_ms_per_1k"]["value"] == pytest.approx(500, rel=0.1)
    signs = {tokens: saved["value"] > 0 for tokens, saved in advice["fit"]["measured"]}
    assert signs == {79: False, 143: False, 271: True, 527: True, 1039: True}
    changed = (tmp_path / "new.yaml").read_text()
    assert "# why this value" in changed and "# stays" in changed
    assert yaml.safe_load(changed)["kv_transfer"] == {
        "recompute_threshold": advice["threshold"],
        "backend": "UCX",
    }


def test_where_reading_never_pays_nothing_is_recommended(tmp_path: Path) -> None:
    folder = made(5000, 1.0, tmp_path / "run")
    ended = pdctl("tune", folder, "-o", tmp_path / "new.yaml")
    assert ended.code == 1
    assert "reading never paid" in ended.out
    assert (tmp_path / "new.yaml").read_text() == SPEC


def test_a_run_without_reads_is_refused_in_one_line(tmp_path: Path) -> None:
    run = MadeRun()
    for row in run.rows:
        row["tokens_read"] = 0
    ended = pdctl("tune", run.write(tmp_path))
    assert (ended.code, len(ended.lines)) == (1, 1)
    assert "a fit needs" in ended.err


def test_gaps_decide_the_ttl(tmp_path: Path) -> None:
    folder = made(100, 0.1, tmp_path / "run")
    draw = random.Random(3)
    gaps = [draw.uniform(1, 40) for _ in range(200)]
    (tmp_path / "gaps").write_text("\n".join(map(str, gaps)))
    ended = pdctl(
        "tune", folder, "--gaps", tmp_path / "gaps", "-o", tmp_path / "new.yaml", "--json"
    )
    ttl = json.loads(ended.out)["ttl"]
    assert ttl["seconds"] - 5 >= max(gaps)
    assert ttl["covered"] == 1.0
    spec: dict[str, Any] = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert spec["kv_transfer"]["decode_ttl"] == f"{ttl['seconds']}s"
    assert int(spec["router"]["handle_ttl"][:-1]) < ttl["seconds"]
    assert pdctl("validate", tmp_path / "new.yaml").code == 0


def test_memory_bounds_the_ttl() -> None:
    gaps = [float(second) for second in range(1, 101)]
    free = recommend_ttl(gaps, 1.0, 1000.0, 1e9)
    tight = recommend_ttl(gaps, 10.0, 1000.0, 500_000.0)
    assert free is not None and tight is not None
    assert (free.covered, free.bound_by_memory) == (1.0, False)
    assert tight.bound_by_memory
    assert tight.seconds < free.seconds
    assert tight.pinned_share is not None and tight.pinned_share <= 0.5
    assert recommend_ttl([1.0], None, None, None) is None


@pytest.mark.parametrize("text", ["1\nx\n", "-1\n", "inf\n"])
def test_gaps_that_are_none_are_told(text: str, tmp_path: Path) -> None:
    folder = made(100, 0.1, tmp_path / "run")
    (tmp_path / "gaps").write_text(text)
    ended = pdctl("tune", folder, "--gaps", tmp_path / "gaps")
    assert (ended.code, len(ended.lines)) == (2, 1)


def test_a_value_is_set_without_touching_the_rest() -> None:
    text = "a:\n  # c\n  x: 1  # one\n\nb: 2\n"
    assert with_value(text, ("a", "x"), "5") == text.replace("x: 1", "x: 5")
    assert yaml.safe_load(with_value(text, ("a", "y"), "3"))["a"] == {"y": 3, "x": 1}
    assert yaml.safe_load(with_value(text, ("c", "z"), "4"))["c"] == {"z": 4}
    with pytest.raises(PdctlError, match="not a block mapping"):
        with_value("a: {x: 1}\n", ("a", "x"), "5")
