"""`pdctl observe report` draws real data, and its page asks nobody for anything."""

import html
import re
from pathlib import Path

import pytest

from pdctl.observe import svg
from pdctl.observe.boards import BOARDS
from tests.cli import pdctl
from tests.observe.browser import screenshot
from tests.observe.conftest import Watched


@pytest.fixture(scope="module")
def pages(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page per theme."""
    folder = tmp_path_factory.mktemp("report")
    made = {theme: folder / f"{theme}.html" for theme in ("light", "dark")}
    for theme, page in made.items():
        words = ("--prometheus", watched.prometheus.url, "--deployment", watched.name)
        ended = pdctl("observe", "report", *words, "--last", "1m", "--theme", theme, "-o", page)
        assert ended.code == 0, ended.err
    return made


def test_every_panel_is_drawn(pages: dict[str, Path]) -> None:
    text = html.unescape(pages["light"].read_text())
    for board in BOARDS:
        for panel in board.panels:
            assert f"<h4>{panel.title}</h4>" in text
    assert "no data:" not in text
    assert "nan" not in re.sub(r"<title>.*?</title>", "", text).lower()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_in_a_browser(pages: dict[str, Path], theme: str) -> None:
    picture = pages[theme].with_suffix(".png")
    asked = screenshot(pages[theme], picture, 1300, 6000)
    assert asked == set()
    assert picture.stat().st_size > 100_000


def test_an_axis_of_bytes_has_round_numbers() -> None:
    chart = svg.line_chart([svg.Line("x", ((0.0, 0.0), (60.0, 19_000.0)))], "bytes", 0.0, 60.0)
    assert re.findall(r">([0-9.]+ (?:KiB|B))<", chart) == [
        "0 B",
        "5 KiB",
        "10 KiB",
        "15 KiB",
        "20 KiB",
    ]


def test_the_browser_would_tell_of_a_request(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://127.0.0.1:1/outside.png">')
    asked = screenshot(page, tmp_path / "page.png", 100, 100)
    assert asked == {"http://127.0.0.1:1/outside.png"}
