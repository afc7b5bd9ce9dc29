"""Memory: of the host, and of the KV cache."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.leaks import WAITING
from pdctl.doctor.checks.lines import OUT_OF_MEMORY_KILL
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Finding, Pattern

RCACHE_SET = Pattern(
    "rcache-limit",
    ("UCX_RCACHE_MAX_UNRELEASED",),
    r"(?P<cannot>already imported|can't reset|cannot reset)?.{0,400}UCX_RCACHE_MAX_UNRELEASED",
)
RCACHE_NOT_SET = Pattern(
    "rcache-limit-not-set",
    ("reset UCX_RCACHE_MAX_UNRELEASED",),
    r"(?:can't|cannot) reset UCX_RCACHE_MAX_UNRELEASED",
)
NO_KV_MEMORY = Pattern(
    "no-kv-memory",
    (
        "No available memory for the cache blocks",
        "Available KV cache memory: -",
        "larger than the maximum number of tokens that can be stored in KV cache",
        "CUDA out of memory",
        "torch.OutOfMemoryError",
        "HIP out of memory",
        "less than desired GPU memory utilization",
        "larger than the available KV cache memory",
        "try to increase --mem-fraction-static",
    ),
)

PREEMPTIONS = Pattern(
    "preemptions",
    ("Preemptions:",),
    r"Preemptions: (?P<count>[1-9]\d*)",
)
PINNED = "pd_engine_pinned_blocks"
BLOCKS = "pd_engine_kv_blocks"


def _registration_cache(evidence: Evidence) -> Iterator[Answer]:
    killed, refused = seen(evidence, OUT_OF_MEMORY_KILL), seen(evidence, RCACHE_NOT_SET)
    mentioned = seen(evidence, RCACHE_SET)
    worker = evidence.text(
        r"(?i)killed process \d+ \((?P<name>[^)]*(?:vllm|worker|python)[^)]*)\)", "commands"
    )
    if not refused and not (killed and (mentioned or worker or _grew(evidence))):
        return
    limited = [leg for leg in evidence.legs if leg.variable("UCX_RCACHE_MAX_UNRELEASED")]
    if limited and not refused:
        return
    yield Finding(
        (killed or refused).leg,
        "likely" if killed and (mentioned or refused) else "possible",
        (*killed.excerpts[:2], *refused.excerpts[:1], *mentioned.excerpts[:1])[:4],
        "Host memory of the engine's workers grows without bound: UCX's registration cache keeps "
        "regions that were not released, until the kernel ends the process. GPU memory stays flat.",
        "Export UCX_RCACHE_MAX_UNRELEASED=1024 before NIXL is imported (in the leg's environment; "
        "pdctl spec: engine.env). vLLM sets it itself unless something imported NIXL earlier. "
        "Watch the workers' RSS.",
        severity=None if killed else "warning",
    )


_RESIDENT = re.compile(r"(?m)^\s*(\d{5,})\s.{0,120}(?:VLLM::|vllm|EngineCore)")


def _grew(evidence: Evidence) -> bool:
    """Whether a worker's resident memory is seen half as large again as before."""
    for leg in evidence.legs:
        name = "process_resident_memory_bytes"
        sizes = leg.metrics.series(name) if leg.metrics else []
        printed = [
            float(size)
            for command in leg.commands
            if "rss" in command.line.lower()
            for size in _RESIDENT.findall(command.output)
        ]
        if any(len(each) > 1 and each[-1] > 1.5 * each[0] for each in (sizes, printed)):
            return True
    return False


def _no_kv_memory(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, NO_KV_MEMORY)
    if found:
        yield Finding(
            found.leg,
            "certain",
            found.excerpts,
            "The engine has no memory left for its KV cache after model and runtime.",
            "Raise --gpu-memory-utilization (pdctl spec: gpu_memory_utilization), lower "
            "--max-model-len or --max-num-seqs, or split the model over more GPUs; end what else "
            "uses the GPU (nvidia-smi).",
        )


def _pinned_turns(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.role("decode"):
        if not leg.metrics:
            continue
        pinned, blocks = leg.metrics.value(PINNED), leg.metrics.value(BLOCKS)
        waiting = leg.metrics.value(WAITING) or 0
        if not pinned or not blocks or pinned < 0.8 * blocks or waiting < 1:
            continue
        yield Finding(
            leg.name,
            "certain",
            (
                leg.metrics.excerpt(PINNED),
                leg.metrics.excerpt(BLOCKS),
                leg.metrics.excerpt(WAITING),
            ),
            f"Finished turns hold {pinned / blocks:.0%} of decode's KV blocks for their TTL, and "
            "new turns wait for memory.",
            "Lower kv_transfer.decode_ttl to what the pauses between turns need, give decode more "
            "KV memory, or let the router release turns early. pdctl doctor SPEC --only "
            "memory-sizing computes a TTL that fits.",
            severity="warning",
        )


def _preempted(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.role("decode"):
        name = "vllm:num_preemptions_total"
        gain = leg.metrics.gain(name) if leg.metrics else None
        hits = leg.hits.get(PREEMPTIONS.name)
        often = hits is not None and (
            hits.count >= 3 or any(int(hit.groups["count"]) >= 10 for hit in hits.last)
        )
        if not often and not (gain and gain >= 10):
            continue
        yield Finding(
            leg.name,
            "likely",
            (
                *((leg.metrics.excerpt(name),) if leg.metrics and gain else ()),
                *(hits.excerpts[:2] if hits and often else ()),
            ),
            "Decode preempts requests: its KV cache does not hold what runs beside the pinned "
            "turns. A preempted request is computed again, on decode, prompt and all.",
            "Give decode more KV memory or fewer requests at once (max_num_seqs), lower "
            "kv_transfer.decode_ttl, or add a decode leg; pdctl doctor SPEC --only memory-sizing.",
        )


CHECKS = (
    Check(
        "PD7002",
        "Host memory grows with UCX's registration cache",
        Category.MEMORY_SIZING,
        "error",
        "registration-cache-grows",
        _registration_cache,
        needs=("log|commands",),
        patterns=(OUT_OF_MEMORY_KILL, RCACHE_SET, RCACHE_NOT_SET),
        premises=("PD5004",),
        explains=("PD8505",),
    ),
    Check(
        "PD7003",
        "No memory for the KV cache",
        Category.MEMORY_SIZING,
        "error",
        "no-kv-memory",
        _no_kv_memory,
        needs=("log",),
        patterns=(NO_KV_MEMORY,),
        explains=("PD8505",),
    ),
    Check(
        "PD7005",
        "Decode preempts requests",
        Category.MEMORY_SIZING,
        "warning",
        "decode-preempts",
        _preempted,
        needs=("log|metrics",),
        patterns=(PREEMPTIONS,),
        premises=("PD7004",),
    ),
    Check(
        "PD7004",
        "Finished turns crowd out new ones",
        Category.MEMORY_SIZING,
        "warning",
        "pinned-turns-crowd",
        _pinned_turns,
        needs=("metrics",),
    ),
)
