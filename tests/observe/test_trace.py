"""`pdctl trace`: from an OTLP file and from a fake of Tempo's API."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.cli import pdctl
from tests.observe import otlp_lines
from tests.observe.otlp_lines import EXPIRED, HIT
from tests.ports import free_ports


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text(otlp_lines.lines())
    return path


def test_a_waterfall(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    ended = pdctl("trace", HIT, "--file", file)
    assert ended.code == 0, ended.err
    told = ended.out.splitlines()
    assert told[0] == f"trace {HIT}  2023-11-14 22:13:20 UTC  1000.0 ms  9 spans"
    names = [line[:15].rstrip() for line in told[1:] if " ms  " in line]
    assert names == [
        "pd.turn",
        "  pd.claim",
        "  pd.prefill",
        "    pd.decision",
        "    llm_request",
        "    pd.transfer",
        "  pd.decode",
        "    llm_request",
        "    pd.transfer",
    ]
    assert "  hit, by readback, 3672 prompt tokens" in told
    assert told[1].split() == ["span", "process", "start", "took"]
    assert "      d2p, 64 descriptors, 6.0 MB, 0.60 GB/s" in told
    assert max(map(len, told)) <= 100
    turn, prefill, decode = (
        next(line for line in told if line.lstrip().startswith(name))
        for name in ("pd.turn", "pd.prefill", "pd.decode")
    )
    assert turn.count("█") > decode.count("█") > prefill.count("█") > 0
    assert decode.index("█") > prefill.rindex("█") - 1


@pytest.mark.parametrize(
    ("words", "trace"),
    [
        (["--slowest"], EXPIRED),
        (["--outcome", "expired"], EXPIRED),
        (["--outcome", "hit"], HIT),
        (["--outcome", "hit", "--slowest"], HIT),
        ([HIT.upper()], HIT),
    ],
)
def test_choosing(file: Path, words: list[str], trace: str) -> None:
    ended = pdctl("trace", *words, "--file", file, "--json")
    assert json.loads(ended.out)["trace_id"] == trace


def test_what_is_lost_is_told(file: Path) -> None:
    ended = pdctl("trace", EXPIRED, "--file", file)
    assert "(its parent is not in the trace)" in ended.out
    assert '"Declining expired remote read"' in ended.out
    assert "error: HTTP 500" in ended.out


def test_what_an_on_call_asks_first(tmp_path: Path) -> None:
    """Which turn of whom, what became of it and why, how long its user waited."""
    path = tmp_path / "t.jsonl"
    attributes = {
        "pd.turn_number": 2,
        "pd.conversation": "5f0c",
        "pd.outcome": "expired",
        "pd.outcome_reason": "expired",
        "pd.route": "recompute",
        "pd.route_reason": "expired",
        "pd.ttft_ms": 270.4,
    }
    turn = otlp_lines.span(HIT, 1, 0, "pd.turn", 0, 500, attributes=attributes)
    claim = {"pd.handle_age_s": 31.2}
    spans = [turn, otlp_lines.span(HIT, 2, 1, "pd.claim", 0, 1, attributes=claim)]
    path.write_text(json.dumps({"resourceSpans": [otlp_lines.resource("router-0", *spans)]}))
    told = pdctl("trace", "--outcome", "expired", "--file", path).out.splitlines()
    assert told[3] == (
        "  turn 2, of conversation 5f0c, expired, by recompute, first token after 270 ms"
    )
    assert told[5] == "    handle 31.2 s old"
    attributes |= {"pd.outcome": "miss", "pd.outcome_reason": "no_handle"}
    attributes |= {"pd.route": "append", "pd.route_reason": "cheapest"}
    turn = otlp_lines.span(HIT, 1, 0, "pd.turn", 0, 500, attributes=attributes)
    path.write_text(json.dumps({"resourceSpans": [otlp_lines.resource("router-0", turn)]}))
    told = pdctl("trace", HIT, "--file", path).out.splitlines()
    assert "miss (no_handle), by append (cheapest), " in told[3]


def test_a_client_s_own_span_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"resourceSpans": otlp_lines.hit_turn(client=77)}))
    ended = pdctl("trace", "--slowest", "--file", path)
    assert "its parent" not in ended.out


def test_json_has_everything(file: Path) -> None:
    spans = json.loads(pdctl("trace", HIT, "--file", file, "--json").out)["spans"]
    by_name = {span["name"]: span for span in spans}
    assert by_name["pd.turn"]["parent_id"] is None
    assert by_name["pd.claim"]["parent_id"] == by_name["pd.turn"]["span_id"]
    assert by_name["pd.claim"]["start_ms"] == 1.0
    assert by_name["pd.claim"]["attributes"] == {"pd.handle_age_s": 3.25}
    assert by_name["pd.decode"]["service"] == "router-0"


def test_a_line_being_written_is_left_out(file: Path) -> None:
    file.write_text(file.read_text() + '{"resourceSpans": [{"resou')
    assert pdctl("trace", HIT, "--file", file).code == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json\n", ":1: not JSON; one OTLP object a line"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}\n', ":1: no OTLP spans: KeyError"),
        ("[]\n", ":1: no OTLP spans: "),
    ],
)
def test_another_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    ended = pdctl("trace", "--slowest", "--file", path)
    assert ended.code == 2
    assert len(ended.lines) == 1
    assert ended.lines[0].startswith(f"{path}{says}")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["f" * 32], 1, f"no trace {'f' * 32}"),
        (["--outcome", "failed"], 1, "no turn with outcome failed"),
        (["xyz"], 2, "'xyz' is not a trace id: up to 32 hexadecimal digits"),
    ],
)
def test_nothing_found(file: Path, words: list[str], code: int, says: str) -> None:
    ended = pdctl("trace", *words, "--file", file)
    assert ended.code == code
    assert ended.lines[-1].endswith(says)


def test_wrong_use() -> None:
    assert pdctl("trace").code == 2
    assert pdctl("trace", HIT, "--slowest").code == 2
    assert pdctl("trace", "--outcome", "nonsense").code == 2


class FakeTempo:
    """A fake of Tempo's search and trace endpoints; it remembers the queries."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        tempo = self
        traces = {HIT: otlp_lines.hit_turn(), EXPIRED: otlp_lines.expired_turn()}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                if url.path == "/api/search":
                    tempo.queries.append(parse_qs(url.query)["q"][0])
                    found = [
                        {"traceID": HIT, "durationMs": 1000, "startTimeUnixNano": "20"},
                        {"traceID": EXPIRED, "durationMs": 3000, "startTimeUnixNano": "10"},
                    ]
                    self._send(200, {"traces": found})
                    return
                trace = url.path.removeprefix("/api/traces/")
                if trace in traces:
                    self._send(200, otlp_lines.as_tempo(traces[trace]))
                else:
                    self._send(404, {})

            def _send(self, status: int, body: Any) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        (port,) = free_ports(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def tempo() -> Iterator[FakeTempo]:
    fake = FakeTempo()
    yield fake
    fake.close()


def test_tempo_tells_the_same_as_a_file(tempo: FakeTempo, file: Path) -> None:
    assert pdctl("trace", HIT, "--tempo", tempo.url).out == pdctl("trace", HIT, "--file", file).out


def test_tempo_is_asked_for_turns(tempo: FakeTempo) -> None:
    slowest = json.loads(pdctl("trace", "--slowest", "--tempo", tempo.url, "--json").out)
    assert slowest["trace_id"] == EXPIRED
    latest = json.loads(pdctl("trace", "--outcome", "hit", "--tempo", tempo.url, "--json").out)
    assert latest["trace_id"] == HIT
    assert tempo.queries == [
        '{ name = "pd.turn" }',
        '{ name = "pd.turn" && span.pd.outcome = "hit" }',
    ]


def test_no_tempo_is_one_line(tempo: FakeTempo) -> None:
    ended = pdctl("trace", "--slowest", "--tempo", "http://127.0.0.1:1")
    assert (ended.code, ended.lines) == (
        1,
        [
            "http://127.0.0.1:1: [Errno 111] Connection refused; --tempo says where Tempo is, "
            "--file reads what the Collector's file exporter wrote"
        ],
    )
    missing = pdctl("trace", "f" * 32, "--tempo", tempo.url)
    assert (missing.code, missing.lines) == (1, [f"{tempo.url}: no trace {'f' * 32}"])
