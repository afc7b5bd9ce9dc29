"""Benchmarks whose load proves nothing: too little of it, unequal, or not what is claimed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.benchmarks import BENCH, bench_commands
from pdctl.doctor.checks.recompute import BY_SOURCE
from pdctl.doctor.checks.settings import is_true, setting
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding

_LOAD = re.compile(
    r"--(?:max-)?(?:concurrency|num-clients|request-rate|num-prompts)[ =](\S+?)(?=[\s;]|$)"
)


_ARM = re.compile(
    r"(?i)(?:\b|_)(?:leg|bidir|label|arm|mode)[ =](on|off|true|false)\b|\b(on|off)\.json"
)


_SERVER = re.compile(r"--(?:base-url|url|endpoint-url|target)[ =](\S+)")


def _unequal_servers(evidence: Evidence) -> Iterator[Finding]:
    """Two servers, each measured under loads that the other never saw."""
    loads: dict[str, set[tuple[str, ...]]] = {}
    shown: list[tuple[str, Excerpt]] = []
    for leg, command in bench_commands(evidence, BENCH):
        server, load = _SERVER.search(command.line), tuple(_LOAD.findall(command.line))
        if server and load and not any("$" in each for each in (server[1], *load)):
            loads.setdefault(server[1], set()).add(load)
            shown.append((leg.name, command.excerpt))
    if len(loads) != 2:
        return
    first, second = loads.values()
    if not first & second:
        yield Finding(
            shown[0][0],
            "likely",
            (shown[0][1], shown[-1][1]),
            f"The two servers ({', '.join(loads)}) were measured under different load: no run of "
            "one has the clients, rate and prompts of a run of the other.",
            "Run both arms with the same clients, rate and prompts, in turn (pdctl bench does).",
            severity="warning",
        )


def _unequal_load(evidence: Evidence) -> Iterator[Answer]:
    arms: dict[str, tuple[tuple[str, ...], str, Excerpt]] = {}
    for leg, command in bench_commands(evidence, re.compile(r"bench|sweep|aiperf|guidellm")):
        for part in re.split(r"[;\n]|&&", f"{command.line}\n{command.output}"):
            arm, load = _ARM.search(part), _LOAD.findall(part)
            if arm and load:
                on = (arm[1] or arm[2]).lower() in ("on", "true")
                arms.setdefault("on" if on else "off", (tuple(load), leg.name, command.excerpt))
    if not arms:
        yield from _unequal_servers(evidence)
    if len(arms) == 2 and arms["on"][0] != arms["off"][0]:
        yield Finding(
            arms["on"][1],
            "certain",
            (arms["on"][2],),
            f"ON and OFF were measured under different load ({'/'.join(arms['on'][0])} against "
            f"{'/'.join(arms['off'][0])}): their times cannot be compared.",
            "Run both arms with the same clients, rate and prompts, in turn (pdctl bench does).",
            severity="warning",
        )


_PROMPTS = re.compile(r"(?:--num-prompts[ =]|Successful requests:\s+)(\d+)")


_CLIENTS = re.compile(r"(?:--(?:max-)?concurrency[ =]|Maximum request concurrency:\s+)(\d+)")


def _too_few(evidence: Evidence) -> Iterator[Answer]:
    for leg, command in bench_commands(evidence, BENCH):
        text = f"{command.line}\n{command.output[:20_000]}"
        prompts, clients = _PROMPTS.search(text), _CLIENTS.search(text)
        if prompts and clients and int(prompts[1]) < 4 * int(clients[1]):
            yield Finding(
                leg.name,
                "likely",
                (command.excerpt,),
                f"{prompts[1]} requests for {clients[1]} clients: the start, when all ask at once, "
                "and the end, when few are left, are most of the measurement.",
                "Send at least ten requests per client and leave out the first of each "
                "(pdctl bench does).",
                severity="warning",
            )
            return


_CONVERSES = re.compile(r"(?i)multi.?turn|conversation|session|chat.?history|mooncake|trace")
_SINGLE = re.compile(
    r"--dataset-name[ =](?:random|sharegpt|sonnet|hf|burstgpt)|--synthetic-input-tokens|"
    r"--random-input-len|--isl\b"
)


def _no_second_turns(evidence: Evidence) -> Iterator[Answer]:
    for leg, command in bench_commands(evidence, BENCH):
        if not _SINGLE.search(command.line) or _CONVERSES.search(command.line):
            continue
        read_back = [
            each.metrics.gain(BY_SOURCE, source="external_kv_transfer")
            for each in evidence.role("prefill")
            if each.metrics
        ]
        if any(read_back) or all(each is None for each in read_back):
            continue
        both_ways = setting(evidence, "bidirectional", "prefill")
        yield Finding(
            leg.name,
            "likely",
            (command.excerpt,),
            "Every request of this benchmark is a conversation of one turn: nothing can be read "
            "back, so it says nothing about bidirectional transfer, for or against it.",
            "Measure conversations: pdctl bench SPEC, or vLLM's benchmark_serving_multi_turn.py "
            "with --send-conversation-id.",
            severity="warning" if both_ways and is_true(both_ways.value) else "info",
        )
        return


CHECKS = (
    Check(
        "PD9009",
        "The benchmark has no second turns",
        Category.BENCHMARK_METHOD,
        "warning",
        "no-second-turns",
        _no_second_turns,
        needs=("commands",),
    ),
    Check(
        "PD9007",
        "ON and OFF under different load",
        Category.BENCHMARK_METHOD,
        "warning",
        "unequal-load",
        _unequal_load,
        needs=("commands",),
    ),
    Check(
        "PD9008",
        "Too few requests per client",
        Category.BENCHMARK_METHOD,
        "warning",
        "too-few-requests",
        _too_few,
        needs=("commands",),
    ),
)
