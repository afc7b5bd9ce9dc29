"""What a run has to show before a ratio is told; every fault is called by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.made_runs import MadeRun
from tests.cli import pdctl


def reported(run: MadeRun, folder: Path) -> tuple[int, dict[str, Any]]:
    ended = pdctl("report", run.write(folder), "-o", "json")
    return ended.code, json.loads(ended.out)


def test_a_sound_run_is_valid_and_has_ratios(tmp_path: Path) -> None:
    code, report = reported(MadeRun(), tmp_path)
    assert (code, report["verdict"], report["problems"]) == (0, "VALID", [])
    longest = report["by_length"][-1]
    assert longest["label"] == "4,096"
    gain = longest["prefill_ratio"]["on"]
    assert gain["low"] <= gain["value"] <= gain["high"]
    assert gain["value"] > 1.5


def bidirectional_on_one_leg(run: MadeRun) -> None:
    for block in run.blocks:
        if block["arm"] == "on":
            block["legs"]["prefill-0"]["bidirectional"] = False


def warm_cache(run: MadeRun) -> None:
    for row in run.of("off", turn=1):
        row["cached_tokens"] = 384


def warm_decode(run: MadeRun) -> None:
    for row in run.of("on", turn=1):
        row["decode_cached_tokens"] = 384


def warm_decode_later(run: MadeRun) -> None:
    for row in run.of("on", turn=3):
        row["decode_cached_tokens"] = 1152


def warm_decode_by_counters(run: MadeRun) -> None:
    run.settings["workload"]["load"]["concurrency"] = 4
    for row in run.rows:
        del row["decode_cached_tokens"]
    for block in run.blocks:
        block["after"]["decode-0"]["local_tokens"] = 6000


def warm_by_counters(run: MadeRun) -> None:
    run.blocks[0]["after"]["prefill-0"]["local_tokens"] = 512


def handle_dropped(run: MadeRun) -> None:
    for row in run.of("on"):
        row |= {"tokens_read": 0, "outcome": "miss"}
    for block in run.blocks:
        block["after"]["prefill-0"] |= {"external_tokens": 0, "nixl_bytes": 0}


def conversation_not_named(run: MadeRun) -> None:
    handle_dropped(run)
    for row in run.rows:
        del row["outcome"]


def turns_appended(run: MadeRun) -> None:
    conversation_not_named(run)
    for row in run.of("on"):
        row["route"] = "append" if row["turn"] > 1 else "recompute"


def some_handles_dropped(run: MadeRun) -> None:
    for row in run.of("on", turn=3):
        missing = row["tokens_read"]
        block = next(b for b in run.blocks if b["arm"] == "on" and b["repeat"] == row["repeat"])
        block["after"]["prefill-0"]["external_tokens"] -= missing
        row |= {"tokens_read": 0, "outcome": "expired"}


def different_lengths(run: MadeRun) -> None:
    for row in run.of("on", turn=3):
        row["prompt_tokens"] = 1500


def different_answers(run: MadeRun) -> None:
    for row in run.of("on", turn=2):
        row["answer_tokens"] = 8


def different_offer(run: MadeRun) -> None:
    run.settings["arms"][0]["offered"] = {"concurrency": 1}
    run.settings["arms"][1]["offered"] = {"concurrency": 4}


def turns_missing(run: MadeRun) -> None:
    run.rows = [row for row in run.rows if (row["arm"], row["turn"]) != ("on", 4)]


def off_reads(run: MadeRun) -> None:
    for block in run.blocks:
        if block["arm"] == "off":
            block["after"]["prefill-0"] |= {"external_tokens": 3000, "nixl_transfers": 3}


def served_beside(run: MadeRun) -> None:
    for block in run.blocks:
        if block["arm"] == "on":
            block["after"]["prefill-0"]["external_tokens"] *= 2


def outputs_differ(run: MadeRun) -> None:
    run.of("on", turn=3)[0]["answer"] = "another"


def turns_fail(run: MadeRun) -> None:
    for row in run.of("on", turn=4)[:2]:
        row["error"] = "HTTP 500: boom"


def legs_silent(run: MadeRun) -> None:
    for block in run.blocks:
        block["legs"]["decode-0"] = {}


def no_counters(run: MadeRun) -> None:
    for block in run.blocks:
        block |= {"before": None, "after": None}


def cut_off(run: MadeRun) -> None:
    run.settings["state"] = "interrupted"


def one_arm_shorter(run: MadeRun) -> None:
    run.blocks = [b for b in run.blocks if (b["arm"], b["repeat"]) != ("on", 4)]
    run.rows = [r for r in run.rows if (r["arm"], r["repeat"]) != ("on", 4)]


FAULTS: list[tuple[Callable[[MadeRun], None], str, str]] = [
    (bidirectional_on_one_leg, "legs agree", "decode-0: True, prefill-0: False"),
    (warm_cache, "cold caches", "off: 4 first turns were not new to prefill (sweep: 384"),
    (warm_decode, "cold caches", "on: 4 turns were in decode's cache already (384"),
    (
        warm_decode_later,
        "cold caches",
        "on: 4 turns were in decode's cache already (1152 tokens of sweep turn 3, whose own turns "
        "had left 1039)",
    ),
    (warm_decode_by_counters, "cold caches", "decode found 24000 tokens in its own cache, more"),
    (warm_by_counters, "cold caches", "found 512 tokens in its own prefix cache"),
    (handle_dropped, "on reads back", "nothing came back (miss x12; miss: the handle"),
    (
        conversation_not_named,
        "on reads back",
        "(no outcome told x12; no outcome told: the turns named no conversation",
    ),
    (turns_appended, "on reads back", "(append x12; append: decode computed the turns alone"),
    (some_handles_dropped, "on reads back", "4 of 12 later turns read less than 90%"),
    (different_lengths, "equal load", "turn 3 has (2048, 16) prompt and answer tokens in off"),
    (different_answers, "equal load", "(1024, 8) in on"),
    (different_offer, "equal load", "were offered different loads: concurrency 1 / 4"),
    (turns_missing, "equal load", "4 turns of off and on have no match"),
    (off_reads, "off reads nothing back", "12000 tokens from decode in 12 reads"),
    (served_beside, "on reads back", "something else was served beside the run"),
    (outputs_differ, "outputs of off and on", "1 of 16 answers differ, first sweep turn 3"),
    (turns_fail, "errors", "on 12.5%; such as: HTTP 500: boom"),
    (legs_silent, "legs agree", "decode-0 do not say how they run"),
    (no_counters, "on reads back", "nothing shows that KV moved"),
    (cut_off, "run", "its state is 'interrupted'"),
    (one_arm_shorter, "run", "different numbers of repeats: {'off': 4, 'on': 3}"),
]


@pytest.mark.parametrize(
    ("fault", "check", "reason"), FAULTS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_fault_makes_the_run_invalid(
    fault: Callable[[MadeRun], None], check: str, reason: str, tmp_path: Path
) -> None:
    run = MadeRun()
    fault(run)
    code, report = reported(run, tmp_path)
    assert (code, report["verdict"]) == (1, "INVALID")
    failed = {each["name"]: each["detail"] for each in report["checks"] if not each["ok"]}
    assert reason in failed[check], failed
    assert all(group["ttft_ratio"] == {} for group in report["by_length"])


def test_what_conversations_share_on_purpose_may_be_in_a_cache(tmp_path: Path) -> None:
    run = MadeRun()
    run.settings["workload"] |= {"kind": "agentic", "shared_tokens": 512}
    for row in run.rows:
        row["decode_cached_tokens"] = 512
    code, report = reported(run, tmp_path / "shared")
    assert (code, report["verdict"]) == (0, "VALID"), report["problems"]
    run.settings["workload"] |= {"kind": "sweep/grow", "shared_tokens": 0}
    assert reported(run, tmp_path / "not")[0] == 1


def test_two_repeats_are_too_few_for_a_ratio(tmp_path: Path) -> None:
    code, report = reported(MadeRun(repeats=2), tmp_path)
    assert (code, report["verdict"]) == (1, "INVALID")
    assert report["problems"] == ["samples: 2 repeats; an interval needs 3 or more"]


def test_reduced_precision_needs_equal_first_tokens_only(tmp_path: Path) -> None:
    run = MadeRun(dtype="bfloat16")
    for row in run.of("on", turn=3):
        row["answer"] = "rounded otherwise later on"
    assert reported(run, tmp_path / "rounded")[1]["verdict"] == "VALID"
    for row in run.of("on"):
        row["first_token"] = "y"
        row["answer"] = "wrong KV"
    code, report = reported(run, tmp_path / "wrong")
    assert code == 1
    assert "0 of 4 first tokens equal" in report["problems"][0]


def test_runs_of_one_arm_each_are_compared(tmp_path: Path) -> None:
    for arm in ("off", "on"):
        run = MadeRun()
        run.settings["arms"] = [each for each in run.settings["arms"] if each["name"] == arm]
        run.rows = run.of(arm)
        run.blocks = [block for block in run.blocks if block["arm"] == arm]
        run.write(tmp_path / arm)
    both = pdctl("report", tmp_path / "off", tmp_path / "on", "-o", "json")
    assert json.loads(both.out)["verdict"] == "VALID"
    alone = pdctl("report", tmp_path / "on", "-o", "json")
    assert (alone.code, json.loads(alone.out)["verdict"]) == (0, "NO COMPARISON")
    twice = pdctl("report", tmp_path / "on", tmp_path / "on")
    assert (twice.code, len(twice.lines)) == (2, 1)


def test_runs_side_by_side_keep_what_each_shared_on_purpose(tmp_path: Path) -> None:
    for arm, shared in (("off", 512), ("on", 0)):
        run = MadeRun()
        run.settings["arms"] = [each for each in run.settings["arms"] if each["name"] == arm]
        run.settings["workload"]["shared_tokens"] = shared
        run.rows = run.of(arm)
        run.blocks = [block for block in run.blocks if block["arm"] == arm]
        for row in run.rows:
            row["decode_cached_tokens"] = shared
        run.write(tmp_path / arm)
    ended = pdctl("report", tmp_path / "on", tmp_path / "off", "-o", "json")
    failed = [each["name"] for each in json.loads(ended.out)["checks"] if not each["ok"]]
    assert failed == ["equal load"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 7}'])
def test_a_folder_without_a_run_is_told_in_one_line(text: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / "run.json").write_text(text)
    ended = pdctl("report", tmp_path)
    assert (ended.code, len(ended.lines)) == (2, 1)
