"""pdctl bench against whatever answers at a URL: here a real router over fake engines."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from router_rig import Router

from tests.cli import pdctl
from tests.waiting import until

SMALL = ("--lengths", "300,600,900", "--answer-tokens", "15", "--endpoint", "chat")
EXPORTED = {
    "metadata": {
        "x_correlation_id": "c1",
        "conversation_id": "session_000000",
        "turn_index": 1,
        "request_start_ns": 1795999423727580099,
        "benchmark_phase": "profiling",
    },
    "metrics": {
        "request_latency": {"value": 143.5, "unit": "ms"},
        "time_to_first_token": {"value": 101.5, "unit": "ms"},
        "usage_prompt_tokens": {"value": 120, "unit": "tokens"},
        "usage_completion_tokens": {"value": 15, "unit": "tokens"},
        "inter_token_latency": {"value": 3.0, "unit": "ms"},
    },
}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def measured(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder) if not row["warmup"]]


def bench(served: Router, out: Path, *more: object) -> Any:
    return pdctl("bench", "--client", "http", "--url", served.url, "-o", out, *more)


@pytest.mark.parametrize("exact", [True, False], ids=["tokenizer", "no tokenizer"])
def test_a_url_is_enough(served: Router, tmp_path: Path, exact: bool) -> None:
    out = tmp_path / "run"
    for engine in served.prefill:
        engine.tokenizer = exact
    ended = bench(
        served, out, *SMALL, "--repeats", "2", "--stats-json-output", tmp_path / "stats.json"
    )
    assert ended.code == 0, ended.err
    assert "NO COMPARISON" in ended.out
    rows = measured(out)
    assert [row["outcome"] for row in rows] == ["miss", "hit", "hit", "hit"] * 2
    assert [row["turn"] for row in rows] == [1, 2, 3, 4] * 2
    for before, row in itertools.pairwise(rows):
        if row["turn"] > 1:
            assert row["tokens_read"] == before["prompt_tokens"] + before["answer_tokens"] - 1
        assert 0 < row["ttft_ms"] <= row["latency_ms"]
        assert row["prefill_ms"] >= 0
    off = 1 if exact else 20
    assert all(abs(row["prompt_tokens"] - row["target_tokens"]) < off for row in rows)
    run = json.loads((out / "run.json").read_text())
    assert (run["state"], run["exact_lengths"]) == ("complete", exact)
    assert len(json.loads((tmp_path / "stats.json").read_text())) == len(rows)


def test_every_repeat_has_content_of_its_own(served: Router, tmp_path: Path) -> None:
    bench(served, tmp_path / "a", *SMALL, "--repeats", "2", "--seed", "x")
    prompts = [
        request["messages"][0]["content"]
        for request in served.prefill[0].requests
        if len(request["messages"]) == 1
    ]
    assert len(prompts) == len({prompt[:16] for prompt in prompts})
    salts = {request.get("cache_salt") for request in served.prefill[0].requests}
    assert None not in salts and len(salts) == 3


def test_two_urls_are_two_arms_and_without_counters_nothing_is_claimed(
    served: Router, tmp_path: Path
) -> None:
    ended = pdctl(
        "bench", "--client", "http", "--url", f"off={served.url}", "--url", f"on={served.url}/v1",
        *SMALL, "--repeats", "3", "-o", tmp_path / "run", "--json",
    )  # fmt: skip
    report = json.loads(ended.out)
    assert (ended.code, report["verdict"]) == (1, "INVALID")
    assert "on reads back: no engine counters: nothing shows that KV moved" in report["problems"]


def test_a_run_stops_on_its_error_budget_and_can_be_resumed(served: Router, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = (*SMALL, "--repeats", "6", "--seed", "s")
    # Prefill answers the warm-up and the first repeat.
    served.prefill[0].faults.extend([None] * (3 + 4) + [500] * 20)
    ended = bench(served, out, *options)
    assert ended.code == 1
    assert "stopped: 4 of" in ended.err
    assert json.loads((out / "run.json").read_text())["state"] == "error budget spent"
    kept = [row for row in measured(out) if not row.get("error")]
    assert [row["repeat"] for row in kept] == [1] * 4
    served.prefill[0].faults.clear()
    again = bench(served, out, *options, "--resume")
    assert again.code == 0, again.err
    rows = measured(out)
    assert [(row["repeat"], row["turn"]) for row in rows] == [
        (repeat, turn) for repeat in range(1, 7) for turn in (1, 2, 3, 4)
    ]
    assert rows[:4] == kept
    other = bench(served, out, *SMALL, "--repeats", "5", "--resume")
    assert (other.code, "another repeats" in other.err) == (2, True)


def test_a_run_whose_turns_fail_is_no_success(served: Router, tmp_path: Path) -> None:
    served.prefill[0].faults.extend([None] * 3 + [500])
    ended = bench(served, tmp_path / "run", *SMALL, "--repeats", "2")
    assert ended.code == 1
    assert "url: sweep turn 1: HTTP 502" in ended.err
    assert re.search(r"FAIL +errors +url 20.0%", ended.out)


def test_an_interrupted_run_says_so_and_can_be_resumed(served: Router, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--client", "http", "--url", served.url, "-o", str(out), *SMALL, "--repeats", "3"]
    served.decode[0].faults.extend([None] * (3 + 4 + 1) + ["hang"])
    program = Path(sys.executable).with_name("pdctl")
    bench = subprocess.Popen(
        [program, "bench", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until("the fifth turn", lambda: (out / "rows.jsonl").exists() and len(measured(out)) == 5)
    # Else the resumed run would meet it.
    until("the turn that hangs", lambda: not served.decode[0].faults)
    bench.send_signal(signal.SIGTERM)
    _, complaints = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert complaints.splitlines()[-1] == "interrupted"
    assert "Traceback" not in complaints and "destroyed" not in complaints
    assert json.loads((out / "run.json").read_text())["state"] == "interrupted"
    assert pdctl("report", out).code == 0
    again = pdctl("bench", *options, "--resume")
    assert again.code == 0, again.err
    assert len(measured(out)) == 12


def test_a_finished_folder_is_not_written_over(served: Router, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    ended = bench(served, tmp_path, *SMALL)
    assert (ended.code, len(ended.lines)) == (2, 1)


def test_agents_run_side_by_side(served: Router, tmp_path: Path) -> None:
    ended = bench(
        served, tmp_path / "run", "--agentic", "4", "--turns", "3", "--system-tokens", "400",
        "--concurrency", "3", "--rate", "50", "--repeats", "1", "--answer-tokens", "15",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    rows = measured(tmp_path / "run")
    assert sorted({row["conversation"] for row in rows}) == [f"agent-{n}" for n in (1, 2, 3, 4)]
    assert len(rows) == 12
    roles = {m["role"] for request in served.prefill[0].requests for m in request["messages"]}
    assert roles == {"system", "user", "assistant", "tool"}


def test_a_trace_is_replayed_with_the_answers_that_came_back(
    served: Router, tmp_path: Path
) -> None:
    talk = [
        {"role": role, "content": content}
        for turn in range(3)
        for role, content in (("user", f"question {turn}"), ("assistant", "of the file"))
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps([{"id": "a", "messages": talk}]))
    ended = bench(served, tmp_path / "run", "--trace", file, "--repeats", "1")
    assert ended.code == 0, ended.err
    last = served.decode[0].requests[-1]["messages"]
    assert [m["content"] for m in last if m["role"] == "user"] == [
        f"question {n}" for n in range(3)
    ]
    assert all(m["content"].startswith("answer-") for m in last if m["role"] == "assistant")


@pytest.fixture
def fake_aiperf(tmp_path: Path) -> Path:
    """Leaves an export of two conversations, and its words, in the folder it is told."""
    first = json.loads(json.dumps(EXPORTED))
    first["metadata"] |= {"x_correlation_id": "c0", "request_start_ns": 1795999420000000000}
    export = f"{json.dumps(EXPORTED)}\n{json.dumps(first)}\n"
    program = tmp_path / "fake-aiperf"
    program.write_text(
        "#!/usr/bin/env python3\nimport json, sys\n"
        "folder = sys.argv[sys.argv.index('--output-artifact-dir') + 1]\n"
        f"open(folder + '/profile_export.jsonl', 'w').write({export!r})\n"
        "json.dump(sys.argv, open(folder + '/words.json', 'w'))\n"
    )
    program.chmod(0o755)
    return program


def test_the_export_of_aiperf_becomes_rows(
    served: Router, fake_aiperf: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ("bench", "--client", "aiperf", "--url", served.url, "--repeats", "3")
    ended = pdctl(*words, "--program", fake_aiperf, "-o", out)
    assert ended.code == 0, ended.err
    # The conversation that began first is the warm-up, wherever the export has it.
    (row,) = measured(out)
    assert (row["arm"], row["turn"], row["prompt_tokens"]) == ("aiperf", 2, 120)
    assert (row["ttft_ms"], row["answer_tokens"]) == (101.5, 15)
    assert len(rows_of(out)) == 2
    asked = json.loads((out / "aiperf/words.json").read_text())
    assert asked[asked.index("--conversation-num") + 1] == "4"
    assert "--num-warmup-sessions" not in asked
    missing = pdctl(*words, "--program", tmp_path / "not-there", "-o", tmp_path / "other")
    assert (missing.code, len(missing.lines)) == (2, 2)


def test_an_interrupted_client_leaves_no_process(served: Router, tmp_path: Path) -> None:
    """Another client's processes end with it, and the run says what became of it."""
    program, pids = tmp_path / "client", tmp_path / "pids"
    program.write_text(
        f"#!/bin/bash\nsleep 600 & echo $! > {pids}.new; mv {pids}.new {pids}\nwait\n"
    )
    program.chmod(0o755)
    words = ["bench", "--client", "aiperf", "--url", served.url, "-o", str(tmp_path / "run")]
    bench = subprocess.Popen(
        [Path(sys.executable).with_name("pdctl"), *words, "--program", str(program)],
        stderr=subprocess.PIPE,
        text=True,
    )
    until("the client's child", pids.exists)
    bench.send_signal(signal.SIGTERM)
    _, complaints = bench.communicate(timeout=60)
    assert (bench.returncode, complaints.splitlines()[-1]) == (130, "interrupted")
    assert json.loads((tmp_path / "run/run.json").read_text())["state"] == "interrupted"
    child = Path(f"/proc/{pids.read_text().strip()}/status")
    until("its end", lambda: not child.exists() or "State:\tZ" in child.read_text())


def test_a_client_that_fails_is_told_with_its_output(served: Router, tmp_path: Path) -> None:
    words = ("bench", "--client", "aiperf", "--url", served.url, "-o", tmp_path / "run")
    ended = pdctl(*words, "--program", "/bin/false")
    assert ended.code == 1
    assert ended.err.splitlines()[-1].endswith(
        "its output: " + str(tmp_path / "run/aiperf/output.log")
    )
    assert json.loads((tmp_path / "run/run.json").read_text())["state"] == "failed"


def test_aiperf_replays_a_trace_that_begins_anew(
    served: Router, fake_aiperf: Path, subword_folder: Path, tmp_path: Path
) -> None:
    messages = [
        {"role": role, "content": f"{role} {turn}"}
        for turn in range(3)
        for role in ("user", "assistant")
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps([{"id": f"c{n}", "messages": messages} for n in range(2)]))
    words = ("bench", "--client", "aiperf", "--url", served.url, "--program", fake_aiperf,
             "--trace", file, "--answer-tokens", "9")  # fmt: skip
    ended = pdctl(*words, "--tokenizer", subword_folder, "-o", tmp_path / "run")
    assert ended.code == 0, ended.err
    text = (tmp_path / "run/aiperf/input.jsonl").read_text()
    warm_up, *sessions = [json.loads(line) for line in text.splitlines()]
    assert [len(each["turns"]) for each in (warm_up, *sessions)] == [3, 4, 4]
    openings = [each["turns"][0] for each in (warm_up, *sessions)]
    assert {opening["role"] for opening in openings} == {"system"}
    assert len({opening["text"] for opening in openings}) == 3
    for session in sessions:
        assert [turn["text"] for turn in session["turns"][1:]] == ["user 0", "user 1", "user 2"]
        assert {turn["output_length"] for turn in session["turns"][1:]} == {9}
    no_tokenizer = pdctl(*words, "-o", tmp_path / "other")
    assert no_tokenizer.code == 2
    assert "needs --tokenizer" in no_tokenizer.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "give either a SPEC, or --client http with --url"),
        (("--client", "http"), "--client http needs --url"),
        (("--client", "http", "--url", "ftp://x"), "is no NAME=http://HOST:PORT"),
        (("--client", "http", "--url", "http://127.0.0.1:1"), "/v1/models"),
        (("x.yaml", "--attach", "--arms", "on,off"), "x.yaml"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    words: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = pdctl("bench", *words)
    assert ended.code in (1, 2)
    assert reason in ended.err
    assert len(ended.lines) == 1
    assert os.listdir(tmp_path) == []
