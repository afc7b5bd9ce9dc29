"""The same result on a terminal, as a page, as Markdown, as a picture and as data."""

import csv
import io
import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdctl.bench.report.charts import tick_step
from tests.bench.made_runs import MadeRun
from tests.cli import pdctl

VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(v) for k, v in attrs if k in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(run: MadeRun, folder: Path) -> tuple[str, Page]:
    pdctl("report", run.write(folder), "-o", "html")
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    return text, page


def test_the_page_stands_alone_and_draws_both_graphs(tmp_path: Path) -> None:
    text, page = page_of(MadeRun(), tmp_path)
    words = " ".join(page.words)
    assert "VALID" in words
    assert "Time to first token over prompt length" in words
    assert "Prefill time: compute and transfer" in words
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    assert "url(" not in re.sub(r"url\(#\w+\)", "", text)


def test_no_text_of_a_chart_leaves_it_or_lies_on_another(tmp_path: Path) -> None:
    text, _ = page_of(MadeRun(lengths=(2048, 4096, 8192, 12288, 16384, 20480, 24576)), tmp_path)
    charts = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(charts) == 8
    for svg in charts:
        root = ElementTree.fromstring(svg)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        boxes = []
        for each in root.iter("{http://www.w3.org/2000/svg}text"):
            long = 6.6 * len(each.text or "")
            x = float(each.attrib["x"])
            anchor = each.attrib.get("text-anchor", "start")
            left = x - {"start": 0, "middle": long / 2, "end": long}[anchor]
            bottom = float(each.attrib["y"])
            assert left >= -2 and left + long <= width + 2, each.text
            assert 8 <= bottom <= height
            boxes.append((left, left + long, bottom - 10, bottom, each.text))
        for number, one in enumerate(boxes):
            for other in boxes[number + 1 :]:
                apart = (
                    one[1] <= other[0]
                    or other[1] <= one[0]
                    or one[3] <= other[2]
                    or other[3] <= one[2]
                )
                assert apart, (one, other)


def test_an_invalid_run_shows_no_ratio_anywhere(tmp_path: Path) -> None:
    run = MadeRun()
    run.settings["state"] = "interrupted"
    _, page = page_of(run, tmp_path)
    words = " ".join(page.words)
    assert "INVALID" in words
    assert "times lower" not in words
    markdown = pdctl("report", tmp_path, "-o", "md").out
    assert not re.search(r"\d\.\d\d \(\d", markdown)
    terminal = pdctl("report", tmp_path)
    assert terminal.code == 1
    assert "INVALID: run: its state is 'interrupted'" in terminal.out


def test_names_from_a_run_cannot_break_the_page(tmp_path: Path) -> None:
    run = MadeRun()
    run.settings["spec"] = "<script>alert(1)</script>"
    run.settings["about"]["model"] = '"><b'
    for row in run.of("on"):
        row["outcome"] = "<i>hit"
    text, _ = page_of(run, tmp_path)
    assert "<script" not in text
    assert "<i>hit" not in text


def test_reads_bound_by_descriptors_are_told(tmp_path: Path) -> None:
    run = MadeRun()
    for row in run.of("on"):
        if row["tokens_read"]:
            row |= {"read_ms": 400.0, "read_post_ms": 330.0, "read_descriptors": 97280}
    assert "bound by descriptors" in pdctl("report", run.write(tmp_path)).out
    for row in run.of("on"):
        row |= {"read_post_ms": 2.0}
    assert "bound by descriptors" not in pdctl("report", run.write(tmp_path)).out


def test_the_article_stands_beside_lengths_that_are_near(tmp_path: Path) -> None:
    run = MadeRun(lengths=(2048, 8192, 24576))
    report = json.loads(pdctl("report", run.write(tmp_path), "-o", "json").out)
    qwen = [each for each in report["article"] if each["reported"]["model"] == "Qwen3-32B"]
    assert [each["measured_tokens"] for each in qwen] == [2048, 24576, 2048, 24576]
    assert round(qwen[1]["reported_ratio"], 2) == 1.69
    glm = [each for each in report["article"] if each["reported"]["tokens"] == 20480]
    assert [each["measured_tokens"] for each in glm] == [None, None]


def test_csv_and_stats_hold_every_measured_turn(tmp_path: Path) -> None:
    run = MadeRun()
    run.rows[0]["warmup"] = True
    lines = list(csv.DictReader(io.StringIO(pdctl("report", run.write(tmp_path), "-o", "csv").out)))
    assert len(lines) == len(run.rows) - 1
    pdctl("report", tmp_path, "-o", "stats")
    stats = json.loads((tmp_path / "stats-on.json").read_text())
    assert len(stats) == len(run.of("on"))
    assert stats[0].keys() == {
        "ttft_ms", "tpot_ms", "latency_ms", "start_time_ms", "input_num_turns",
        "input_num_tokens", "output_num_tokens", "output_num_chunks",
        "output_num_first_chunk_tokens", "approx_cached_percent", "conversation_id", "client_id",
    }  # fmt: skip


def test_statistics_of_the_upstream_benchmark_are_read(tmp_path: Path) -> None:
    run = MadeRun()
    pdctl("report", run.write(tmp_path), "-o", "stats")
    files = (tmp_path / "stats-off.json", tmp_path / "stats-on.json")
    report = json.loads(pdctl("report", *files, "-o", "json").out)
    assert report["verdict"] == "INVALID"
    longest = report["by_length"][-1]["cells"]
    expected = statistics.median(row["ttft_ms"] for row in run.of("on", turn=4))
    assert longest["stats-on"]["ttft"]["median"] == expected
    (tmp_path / "other.json").write_text('[{"ttft_ms": 1}]')
    ended = pdctl("report", tmp_path / "other.json")
    assert (ended.code, len(ended.lines)) == (2, 1)


def test_lengths_that_were_not_planned_stand_in_bands(tmp_path: Path) -> None:
    run = MadeRun()
    for row in run.rows:
        row["prompt_tokens"] += 10
        del row["target_tokens"]
    report = json.loads(pdctl("report", run.write(tmp_path), "-o", "json").out)
    assert [(each["label"], each["tokens"]) for each in report["by_length"]] == [
        ("up to 2,048", 1034),
        ("up to 4,096", 2058),
        ("up to 8,192", 4106),
    ]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ended = pdctl("report", MadeRun().write(tmp_path), "-o", "png", "-f", tmp_path / "x.png")
    assert ended.code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("most", "step"), [(9, 2), (10, 2), (778, 200), (3420, 1000), (0.4, 0.1)])
def test_axes_have_round_steps(most: float, step: float) -> None:
    assert tick_step(most) == pytest.approx(step)
