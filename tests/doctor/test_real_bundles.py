"""Bundles that `pdctl collect` made of a real pair (vLLM 0.29.0, NIXL 1.4.1, on CPU, over UCX or
LIBFABRIC); paths and machine names are replaced, histograms' buckets and most of the environment
left out."""

import json
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
