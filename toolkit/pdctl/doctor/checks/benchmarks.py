"""Measurements that do not say what they seem to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pdctl.doctor.checks.captures import requests, sent_to
from pdctl.doctor.checks.recompute import BY_SOURCE
from pdctl.doctor.evidence.facts import Capture, Command, Evidence, LegEvidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding

BENCH = re.compile(
    r"bench serve|benchmark_serving|vllm-?bench|genai-perf|aiperf|guidellm|bench_serving"
)
_SEED = re.compile(r"--(?:random-)?seed[ =](\S+?)(?=[\s;]|$)")


def bench_commands(evidence: Evidence, regex: re.Pattern[str]) -> list[tuple[LegEvidence, Command]]:
    return [
        (leg, command)
        for leg in evidence.legs
        for command in leg.commands
        if regex.search(command.line) or regex.search(command.output[:4000])
    ]


def _same_seed(evidence: Evidence) -> Iterator[Answer]:
    runs = bench_commands(evidence, BENCH)
    seeds: Counter[str] = Counter()
    looped = False
    unseeded_runs = 0
    for _, command in runs:
        text = f"{command.line}\n{command.output}"
        if "reset_prefix_cache" in text:
            return
        found = _SEED.findall(text)
        fixed = [seed for seed in found if "$" not in seed]
        seeds.update(fixed)
        varied = len(fixed) < len(found)
        loop = bool(re.search(r"\bfor \w+ in\b|\bwhile\b|seq \d", command.line)) and not varied
        looped = looped or (loop and ("random" in text or bool(fixed)))
        unseeded = not found and "random" in text
        unseeded_runs += len(BENCH.findall(text)) if unseeded else 0
    looped = looped or unseeded_runs > 1
    if not looped and not any(count > 1 for count in seeds.values()):
        return
    warm = next(
        (
            leg.metrics.excerpt("vllm:prefix_cache_hits_total")
            for leg in evidence.engines
            if leg.metrics and (leg.metrics.value("vllm:prefix_cache_hits_total") or 0) > 0
        ),
        None,
    )
    yield Finding(
        runs[0][0].name,
        "certain" if warm else "likely",
        (runs[0][1].excerpt, *((warm,) if warm else ())),
        "The cells of the sweep send the same prompts: a random dataset is the same for the same "
        "seed (0 when none is given), and the servers keep their prefix cache, so later cells hit "
        "what earlier ones left.",
        "Use a new seed in every cell, or POST /reset_prefix_cache on both roles and let pinned "
        "decode blocks expire between cells; record hit counters around each run (pdctl bench "
        "does).",
        severity="warning",
    )


_REASONING = re.compile(
    r'"content"\s*:\s*"(?:\\n|\s)*(?:<(?:think|thinking|reasoning|thought)\b|<\|channel\|>analysis)'
)


def _reasoning(evidence: Evidence) -> Iterator[Answer]:
    for leg, capture in requests(evidence):
        if _REASONING.search(capture.text):
            yield Finding(
                leg.name,
                "likely",
                (Excerpt(capture.source, capture.text.strip()[:400]),),
                "The client sends reasoning and answer together back as the assistant's content, "
                "which real clients do not: the template renders another history, and hit rates "
                "are not those of production.",
                "Decide what history is: content only, or content and reasoning_content, and say "
                "so beside the numbers (pdctl bench load --history).".replace(
                    " (pdctl bench load --history)", ""
                ),
                severity="warning",
            )
            return


_WHAT = re.compile(r'"(?:prompt|messages)"\s*:\s*(.{1,400}?)(?=,\s*"|\}\s*$)', re.DOTALL)


def _asked_twice(evidence: Evidence) -> list[tuple[LegEvidence, Capture]]:
    """Requests of a client that asks two servers for the same prompt, one after the other."""
    asked = list(requests(evidence, "client", DEPLOYMENT))
    if any(re.search(r"do_remote_(?:decode|prefill)", each.text) for _, each in asked):
        return []
    prompts = [match[1] if (match := _WHAT.search(each.text)) else "" for _, each in asked]
    return [
        each
        for each, prompt in zip(asked, prompts, strict=True)
        if prompt and prompts.count(prompt) == 2
    ]


def _no_remote_decode(evidence: Evidence) -> Iterator[Answer]:
    plain = [
        (leg, capture)
        for leg, capture in (*sent_to(evidence, "prefill"), *_asked_twice(evidence))
        if re.search(r'"max_(?:completion_)?tokens"\s*:\s*1\b', capture.text)
        and not re.search(r"do_remote_decode\W+true", capture.text)
    ]
    idle = [
        leg.metrics.excerpt(name)
        for leg in evidence.role("decode")
        for name in ("vllm:nixl_xfer_time_seconds_count", "vllm:nixl_bytes_transferred_count")
        if leg.metrics and leg.metrics.value(name) == 0
    ]
    if plain:
        yield Finding(
            plain[0][0].name,
            "certain" if idle else "likely",
            (Excerpt(plain[0][1].source, plain[0][1].text.strip()[:300]), *idle[:1]),
            "The request to prefill does not say do_remote_decode: true. Prefill's part is chosen "
            "per request by kv_transfer_params, not by the server's kv_role, so it keeps nothing "
            "for decode and decode computes everything: the measurement shows no transfer at all.",
            'Send "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false} to '
            "prefill and relay what it answers to decode. Before trusting numbers compare the "
            "count of transfers with requests x tensor parallel ranks.",
        )


def _starved_nixlbench(evidence: Evidence) -> Iterator[Answer]:
    for leg, command in bench_commands(evidence, re.compile(r"\bnixlbench\b")):
        text = f"{command.line}\n{command.output}"
        settings = re.findall(
            r"--(?:enable_pt[ =](?:0|false)|max_batch_size[ =]1\b|num_threads[ =]1\b"
            r"|max_block_size[ =]\d{1,5}\b)",
            text,
        )
        small = [each for each in settings if "num_threads" not in each]
        if small:
            yield Finding(
                leg.name,
                "certain" if len(settings) > 1 else "likely",
                (command.excerpt,),
                f"nixlbench is starved by its settings ({', '.join(settings)}): without progress "
                "thread, with one thread or a batch of one it measures latency, not bandwidth; and "
                "on EFA the backend to measure is LIBFABRIC.",
                "nixlbench --backend LIBFABRIC --enable_pt 1 --max_batch_size 64 or more, block "
                "sizes like the engine's ('Avg number of descriptors' in its log), initiator and "
                "target on different hosts; compare with a figure that the NICs can carry.",
                severity="warning",
            )
            return


def _no_conversation_id(evidence: Evidence) -> Iterator[Answer]:
    for leg, command in bench_commands(
        evidence, re.compile(r"benchmark_serving_multi_turn|multi_turn")
    ):
        if "multi_turn" in command.line and "--send-conversation-id" not in command.line:
            yield Finding(
                leg.name,
                "certain",
                (command.excerpt,),
                "The multi-turn benchmark sends no conversation id, so the router has nothing to "
                "find the turn before by: ON measures the same as OFF, every turn a miss.",
                "Add --send-conversation-id.",
            )
            return


def _local_cache(evidence: Evidence) -> Iterator[Answer]:
    measured = bench_commands(evidence, re.compile(r"bench|sweep|--stats-json-output"))
    for leg in evidence.role("prefill"):
        if not leg.metrics or not measured:
            continue
        local = leg.metrics.value(BY_SOURCE, source="local_cache_hit") or 0
        remote = leg.metrics.value(BY_SOURCE, source="external_kv_transfer")
        computed = leg.metrics.value(BY_SOURCE, source="local_compute") or 0
        if remote == 0 and local > computed:
            yield Finding(
                leg.name,
                "likely",
                (
                    leg.metrics.excerpt(BY_SOURCE, source="local_cache_hit"),
                    leg.metrics.excerpt(BY_SOURCE, source="external_kv_transfer"),
                ),
                "Prefill finds the history in its own prefix cache, so nothing is read back and "
                "ON and OFF measure the same.",
                "To measure readback start prefill with --no-enable-prefix-caching (pdctl spec: "
                "prefix_caching: false on prefill), or send turns to a prefill that does not know "
                "the conversation.",
                severity="warning",
            )


CHECKS = (
    Check(
        "PD9001",
        "Cells of a sweep send the same prompts",
        Category.BENCHMARK_METHOD,
        "warning",
        "same-seed",
        _same_seed,
        needs=("commands",),
    ),
    Check(
        "PD9002",
        "Reasoning is sent back as content",
        Category.BENCHMARK_METHOD,
        "warning",
        "reasoning-as-content",
        _reasoning,
        needs=("http",),
    ),
    Check(
        "PD9003",
        "Prefill is not told to hand over",
        Category.BENCHMARK_METHOD,
        "error",
        "no-remote-decode",
        _no_remote_decode,
        needs=("http",),
        explains=("PD4511", "PD4503"),
    ),
    Check(
        "PD9004",
        "nixlbench is starved",
        Category.BENCHMARK_METHOD,
        "warning",
        "nixlbench-starved",
        _starved_nixlbench,
        needs=("commands",),
    ),
    Check(
        "PD9005",
        "The benchmark sends no conversation id",
        Category.BENCHMARK_METHOD,
        "error",
        "benchmark-without-conversation-id",
        _no_conversation_id,
        needs=("commands",),
        explains=("PD5501",),
    ),
    Check(
        "PD9006",
        "The local cache hides readback",
        Category.BENCHMARK_METHOD,
        "warning",
        "local-cache-hides-readback",
        _local_cache,
        needs=("metrics",),
    ),
)
