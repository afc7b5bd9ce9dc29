"""Bundles that `pdctl collect` made of a real pair (vLLM 0.29.0, NIXL 1.4.1, on CPU, over UCX or
LIBFABRIC); paths and machine names are replaced, histograms' buckets and most of the environment
left out."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.cli import pdctl

REAL = Path(__file__).parent / "real"


def codes(bundle: Path, worst: tuple[str, ...] = ("error", "warning")) -> list[str]:
    ended = pdctl("doctor", "--bundle", bundle, "-o", "json")
    found = json.loads(ended.out)["findings"]
    return [each["code"] for each in found if each["severity"] in worst]


@pytest.mark.parametrize("bundle", sorted(REAL.glob("healthy-*")), ids=lambda path: path.name)
def test_a_healthy_pair_has_no_error_and_no_warning(bundle: Path) -> None:
    assert codes(bundle) == []


def test_bidirectional_transfer_on_one_side() -> None:
    assert codes(REAL / "one-sided.tar.gz") == ["PD3007"]


@pytest.fixture
def logs_alone(tmp_path: Path) -> Path:
    """What the two engines of a healthy pair logged, and nothing else."""
    with tarfile.open(REAL / "healthy-after-turns.tar.gz") as packed:
        packed.extractall(tmp_path / "whole", filter="data")
    for log in (tmp_path / "whole").rglob("*-0/log.txt"):
        if not log.parent.name.startswith("router"):
            kept = tmp_path / "logs" / log.parent.name / "log.txt"
            kept.parent.mkdir(parents=True)
            kept.write_bytes(log.read_bytes())
    return tmp_path / "logs"


def test_a_setting_is_read_wherever_it_stands_in_the_line_of_arguments(logs_alone: Path) -> None:
    log = logs_alone / "decode-0/log.txt"
    before, arguments, rest = log.read_text().partition("non-default args: ")
    assert rest.index("kv_connector='Nixl") > 250
    pushing = rest.replace("kv_connector='NixlConnector'", "kv_connector='NixlPushConnector'", 1)
    log.write_text(before + arguments + pushing)
    assert "PD3010" in codes(logs_alone)


@pytest.mark.parametrize("last", ["kv_connector='N", "kv_connector=Nix"])
def test_a_value_that_is_cut_off_with_its_line_is_none(logs_alone: Path, last: str) -> None:
    log = logs_alone / "decode-0/log.txt"
    before, arguments, rest = log.read_text().partition("non-default args: ")
    line, end, after = rest.partition("\n")
    cut = line.partition("kv_connector='")[0] + last
    log.write_text(before + arguments + cut + end + after)
    assert "PD3010" not in codes(logs_alone)
