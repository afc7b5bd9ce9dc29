"""Bundles that `pdctl collect` made of a real pair (vLLM 0.29.0, NIXL 1.4.1, on CPU, over UCX or
LIBFABRIC); paths and machine names are replaced, histograms' buckets and most of the environment
left out."""

import json
import tarfile
from pathlib import Path

import pytest

from pdctl.doctor.model import LONGEST_VALUE
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


def test_of_a_value_that_is_kept_in_part_only_what_ends_is_told(tmp_path: Path) -> None:
    with tarfile.open(REAL / "healthy-after-turns.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    (log,) = tmp_path.rglob("decode-0/log.txt")
    begin, arguments, rest = log.read_text().partition("non-default args: ")
    told = len(rest.partition("kv_connector='N")[0]) + len("kv_connector='N")
    other = "enable_prompt_tokens_details"
    assert len(other) > told - LONGEST_VALUE > 0
    rest = rest.replace(other, other[: LONGEST_VALUE - told], 1)
    log.write_text(begin + arguments + rest)
    assert codes(log.parents[1]) == []
