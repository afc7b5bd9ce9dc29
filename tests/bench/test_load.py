"""What is sent: exact lengths, fresh content, the same in every arm."""

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from pdctl.bench.arms import arms_named, order
from pdctl.bench.enginelog import transfer_metrics, transfers_in
from pdctl.bench.engines import counters_of, settings_in_log
from pdctl.bench.tokens import LocalTokenizer, Messages, ids_of_tokens, text_to_fill
from pdctl.bench.trace import trace
from pdctl.bench.words import fresh_text
from pdctl.bench.workload import Load, agentic, sweep
from pdctl.errors import PdctlError


@pytest.fixture
def subwords(subword_folder: Path) -> LocalTokenizer:
    return LocalTokenizer(subword_folder)


@pytest.mark.parametrize("target", [70, 71, 72, 500, 1023, 2048])
def test_a_prompt_has_exactly_the_tokens_asked_for(subwords: LocalTokenizer, target: int) -> None:
    history: Messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "x"},
    ]

    async def made() -> int:
        text = await text_to_fill(subwords, history, "user", f"seed-{target}", target)
        return await subwords.count_chat([*history, {"role": "user", "content": text}])

    assert asyncio.run(made()) == target


def test_a_prompt_shorter_than_its_history_is_refused(subwords: LocalTokenizer) -> None:
    history: Messages = [{"role": "user", "content": "hello " * 200}]
    with pytest.raises(PdctlError, match="the history alone has about"):
        asyncio.run(text_to_fill(subwords, history, "user", "s", 50))


def test_token_ids_are_as_many_as_asked_for(subwords: LocalTokenizer) -> None:
    ids = asyncio.run(ids_of_tokens(subwords, "s", 777))
    assert len(ids) == 777


def test_texts_of_other_seeds_share_no_beginning() -> None:
    texts = {fresh_text(f"seed-{number}", 64)[:16] for number in range(200)}
    assert len(texts) == 200
    assert fresh_text("a", 50) == fresh_text("a", 50)


def test_a_sweep_reads_back_at_every_length() -> None:
    workload = sweep((2048, 4096), 32, 256, "grow", Load())
    (conversation,) = workload.conversations
    assert [turn.target_tokens for turn in conversation.turns] == [1024, 2048, 4096]
    pairs = sweep((2048, 4096), 32, 256, "second", Load()).conversations
    assert [[turn.target_tokens for turn in each.turns] for each in pairs] == [
        [1760, 2048],
        [3808, 4096],
    ]


@pytest.mark.parametrize("lengths", [(), (2048, 1024), (64,), (2048, 2060)])
def test_lengths_that_leave_no_room_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(PdctlError) as refused:
        sweep(lengths, 32, 256, "grow", Load())
    assert refused.value.code == 2


def test_agents_share_a_system_prompt_and_get_results_of_tools() -> None:
    workload = agentic(3, 4, 2000, 16, "s", Load(), 2.0)
    for conversation in workload.conversations:
        first, *later = conversation.turns
        assert [part.role for part in first.parts] == ["system", "user"]
        assert first.parts[0].shared and first.parts[0].tokens == 2000
        assert {part.role for turn in later for part in turn.parts} == {"tool"}
        assert all(turn.gap_s > 0 for turn in later)
    assert workload == agentic(3, 4, 2000, 16, "s", Load(), 2.0)


def test_a_trace_keeps_the_users_words(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "a" * 80},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "never answered"},
    ]
    file.write_text(json.dumps([{"id": "c1", "messages": messages}]))
    (conversation,) = trace(file, None, "s", Load()).conversations
    assert conversation.id == "c1"
    assert [turn.answer_tokens for turn in conversation.turns] == [20, 1]
    assert [turn.parts[-1].text for turn in conversation.turns] == ["first", "second"]


def described(**changed: Any) -> dict[str, Any]:
    tokens = {"distribution": "uniform", "min": 100, "max": 160}
    return {
        "filetype": "generate_conversations",
        "num_conversations": 40,
        "text_files": ["not-read.txt"],
        "prompt_input": {
            "num_turns": {"distribution": "constant", "value": 7},
            "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
            "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
            "num_tokens": tokens,
            **changed,
        },
        "prompt_output": {"num_tokens": tokens},
    }


def test_described_conversations_are_generated(tmp_path: Path) -> None:
    file = tmp_path / "generate.json"
    file.write_text(json.dumps(described()))
    workload = trace(file, None, "s", Load())
    assert workload == trace(file, None, "s", Load())
    assert workload != trace(file, None, "other", Load())
    assert (len(workload.conversations), workload.shared_tokens()) == (40, 500)
    prefixes = []
    for conversation in workload.conversations:
        first, *later = conversation.turns
        # Seven messages are four of the user's: an odd number is rounded up.
        assert len(later) == 3
        system, user = first.parts
        assert (system.role, system.tokens, system.shared) == ("system", 500, True)
        prefixes.append((user.tokens or 0) - 130)
        for turn in later:
            (part,) = turn.parts
            assert 100 <= (part.tokens or 0) <= 160
        assert all(100 <= turn.answer_tokens <= 160 for turn in conversation.turns)
    assert statistics.mean(prefixes) == pytest.approx(1000, rel=0.25)
    assert {turn.answer_tokens for turn in trace(file, 9, "s", Load()).conversations[0].turns} == {
        9
    }


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        ({"distribution": "constant", "value": 300}, 300),
        ({"distribution": "uniform", "min": 200, "max": 400}, 300),
        ({"distribution": "lognormal", "average": 300}, 300),
        ({"distribution": "lognormal", "mean": 5.0, "sigma": 0.5}, 168),
        ({"distribution": "poisson", "alpha": 300}, 300),
        ({"distribution": "zipf", "alpha": 3.5}, 1.19),
        ({"distribution": "zipf", "alpha": 1.5, "max": 1}, 1),
    ],
)
def test_token_counts_follow_their_distribution(
    distribution: dict[str, Any], mean: float, tmp_path: Path
) -> None:
    file = tmp_path / "generate.json"
    turns = {"distribution": "constant", "value": 100}
    file.write_text(json.dumps(described(num_tokens=distribution, num_turns=turns)))
    drawn = [
        turn.parts[0].tokens or 0
        for conversation in trace(file, None, "s", Load()).conversations
        for turn in conversation.turns[1:]
    ]
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(
    "distribution",
    [
        None,
        {"distribution": "normal"},
        {"distribution": "constant"},
        {"distribution": "uniform", "min": 5, "max": 4},
        {"distribution": "zipf", "alpha": 1},
        {"distribution": "lognormal", "average": 5, "median_ratio": 1},
    ],
)
def test_a_wrong_distribution_is_told_in_one_line(distribution: Any, tmp_path: Path) -> None:
    file = tmp_path / "generate.json"
    file.write_text(json.dumps(described(num_tokens=distribution)))
    with pytest.raises(PdctlError, match=r"prompt_input\.num_tokens") as refused:
        trace(file, None, "s", Load())
    assert refused.value.code == 2


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '[{"id": 1}]',
        '{"filetype": "generate_conversations"}',
        '{"filetype": "generate_conversations", "num_conversations": 2}',
        '[{"messages": []}]',
    ],
)
def test_a_file_that_is_no_trace_is_told(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(PdctlError) as refused:
        trace(file, None, "s", Load())
    assert refused.value.code == 2


def test_arms_that_restart_engines_stay_together_and_others_alternate() -> None:
    restarting = [(arm.name, n) for arm, n in order(arms_named("off,on"), 4, 2)]
    assert restarting == [
        ("off", 1), ("off", 2), ("on", 1), ("on", 2), ("on", 3), ("on", 4), ("off", 3), ("off", 4),
    ]  # fmt: skip
    routes = [(arm.name, n) for arm, n in order(arms_named("recompute,readback"), 2, 1)]
    assert routes == [("recompute", 1), ("readback", 1), ("readback", 2), ("recompute", 2)]


LINE = (
    "(EngineCore pid=12) INFO 11-29 12:34:56 [base.py:1] KV Transfer metrics: "
    "Num successful transfers=3, Avg xfer time (ms)=8.871, P90 xfer time (ms)=10.504, "
    "Avg post time (ms)=2.538, P90 post time (ms)=3.681, Avg MB per transfer=5.667, "
    "Throughput (MB/s)=638.762, Avg number of descriptors=64.0"
)


def test_transfer_metrics_are_read_from_a_log() -> None:
    assert transfer_metrics(LINE) == {
        "transfers": 3, "mean_ms": 8.871, "p90_ms": 10.504, "post_mean_ms": 2.538,
        "post_p90_ms": 3.681, "mean_mb": 5.667, "mb_per_s": 638.762, "descriptors": 64.0,
        "at": "11-29 12:34:56",
    }  # fmt: skip
    found = transfers_in(f"noise\n{LINE}\n{LINE[:-30]}\n", "prefill-0", "prefill")
    assert [each["direction"] for each in found] == ["D->P", "D->P"]
    assert transfer_metrics("KV Transfer metrics: nothing of ours") is None
    assert transfer_metrics("something else") is None


def test_legs_tell_their_settings_in_their_logs() -> None:
    ours = settings_in_log(
        "x pd_connector: connector active: role=kv_producer bidirectional=False "
        "kv_recompute_threshold=64 decoder_kv_blocks_ttl=480 kv_load_failure_policy=recompute "
        "readback=off\n"
    )
    assert (ours["bidirectional"], ours["recompute_threshold"]) == (False, 64)
    stock = settings_in_log(
        "Bidirectional KV transfer is enabled and the kv recompute threshold is set to 32 tokens."
        "KV blocks on D are released after a TTL of 480 seconds."
    )
    assert (stock["bidirectional"], stock["recompute_threshold"]) == (True, 32)
    assert settings_in_log("nothing") == {}


def test_counters_are_summed_over_a_leg() -> None:
    text = (
        'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 5.0\n'
        'vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 7.0\n'
        'vllm:nixl_bytes_transferred_sum{engine="0"} 4096.0\n'
        'vllm:cache_config_info{block_size="128",num_gpu_blocks="10"} 1.0\n'
    )
    counters = counters_of(text)
    assert counters is not None
    assert counters["external_tokens"] == 12
    assert counters["nixl_bytes"] == 4096
    assert (counters["block_size"], counters["kv_tokens"]) == (128, 1280)
    assert counters_of("python_gc_objects_collected_total 3\n") is None
