"""docs/telemetry.md tells what telemetry.py says."""

from pathlib import Path

from pd_connector import contract, telemetry
from pdctl.observe.boards import BOARDS
from pdctl.observe.check import selectors
from tests.cli import pdctl

PAGE = Path(__file__).parents[2] / "docs/telemetry.md"


def test_up_to_date() -> None:
    """Run `pdctl observe names > docs/telemetry.md` when this fails."""
    ended = pdctl("observe", "names")
    assert ended.code == 0
    assert ended.out == PAGE.read_text()


def test_everything_is_named() -> None:
    text = PAGE.read_text()
    for metric in telemetry.METRICS:
        assert f"| `{metric.name}` | {metric.kind} |" in text
    for span in telemetry.SPANS:
        assert f"### `{span.name}`" in text
        for attribute in span.attributes:
            assert f"| `{attribute.name}` | {attribute.type} |" in text
    for outcome in contract.Outcome:
        assert f"`{outcome.value}`" in text


def test_vllm_s_metrics_on_panels_are_named() -> None:
    text = PAGE.read_text()
    names = {
        name
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
        for name, _ in selectors(query.expr)
        if name.startswith("vllm:")
    }
    for name in names:
        assert f"`{name.removesuffix('_bucket')}`" in text
