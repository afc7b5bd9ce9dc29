"""Whether the blocks that decode's TTL pins fit into its KV cache."""

import json
from collections.abc import Iterator

from pd_connector import contract, telemetry
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.legs import plain, setting
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Unknown
from pdctl.doctor.sizing import Load, shape_of, size
from pdctl.spec.model import Spec


def capacity_of(leg: LegEvidence, evidence: Evidence) -> tuple[int, Excerpt] | None:
    """Tokens that a decode leg's KV cache holds: as the running leg says, else by the spec."""
    name = "vllm:cache_config_info"
    if leg.metrics:
        blocks = leg.metrics.label(name, "num_gpu_blocks")
        block = leg.metrics.label(name, "block_size")
        if blocks and block and blocks.isdecimal() and block.isdecimal():
            shown = {"block_size": block, "num_gpu_blocks": blocks}
            return int(blocks) * int(block), leg.metrics.excerpt(name, **shown)
        own = leg.metrics.value(telemetry.ENGINE_BLOCKS.name)
        size_said = plain(leg.config.get("block_size")) if leg.config else None
        if own and isinstance(size_said, int):
            return int(own) * size_said, leg.metrics.excerpt(telemetry.ENGINE_BLOCKS.name)
    spec = evidence.spec
    if spec is None or spec.engine.device != "cpu":
        return None
    if (per_token := bytes_per_token(evidence)) is None:
        return None
    return spec.engine.cpu_kv_cache // per_token, Excerpt(
        "deployment/spec.yaml",
        f"engine.cpu_kv_cache: {spec.engine.cpu_kv_cache} bytes, {per_token} bytes per token",
    )


def bytes_per_token(evidence: Evidence) -> int | None:
    """From the model's shape and the KV type; None when either is not known."""
    try:
        config = json.loads(evidence.model) if evidence.model else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or evidence.spec is None:
        return None
    shape = shape_of(config, evidence.spec.model.kv_cache_dtype, evidence.spec.model.dtype)
    return shape.bytes_per_token if shape else None


def _load(spec: Spec) -> Load | None:
    work = spec.workload
    if work.conversations is None:
        return None
    context = work.context_tokens or spec.model.max_model_len
    return Load(work.conversations, context, work.turn_gap, work.conversation_time)


def _sizing(evidence: Evidence) -> Iterator[Answer]:
    spec, legs = evidence.spec, evidence.role("decode")
    if spec is None or not legs or not spec.kv_transfer.bidirectional:
        return
    load = _load(spec)
    if load is None:
        yield Unknown(
            "how many conversations are expected",
            "set workload.conversations in the spec (or pdctl doctor --conversations N)",
        )
        return
    for leg in legs:
        found = capacity_of(leg, evidence)
        if found is None:
            yield Unknown(
                f"{leg.name}: the size of its KV cache", "start the leg: its /metrics tell it"
            )
            continue
        yield _of_leg(leg, evidence, spec, load, *found, len(legs))


def _of_leg(
    leg: LegEvidence,
    evidence: Evidence,
    spec: Spec,
    load: Load,
    capacity: int,
    said: Excerpt,
    legs: int,
) -> Finding:
    in_use = setting(leg, "decode_ttl")
    ttl = float(in_use.value) if in_use else spec.kv_transfer.decode_ttl
    answer = size(load, ttl, capacity, legs)
    per_token = bytes_per_token(evidence)
    gib = f" ({answer.needed * per_token / 2**30:.1f} GiB)" if per_token else ""
    sums = Excerpt(
        "sizing",
        f"{load.conversations} conversations of {load.context} tokens over {legs} decode legs: "
        f"{answer.in_progress} tokens in progress, {answer.pinned} pinned for a TTL of {ttl:g} s "
        f"after conversations of {load.conversation_time:g} s; {answer.needed}{gib} of "
        f"{capacity} tokens",
    )
    shortest = load.turn_gap + 2 * contract.READ_MARGIN_SECONDS
    if answer.fits:
        return Finding(
            leg.name,
            "likely",
            (said, sums),
            f"Decode's pinned blocks fit: {100 * answer.needed / capacity:.0f} % of its KV cache "
            f"at the expected load; a TTL of up to {answer.longest_ttl:.0f} s would.",
            "Nothing to do.",
            severity="info",
        )
    if answer.longest_ttl >= shortest:
        return Finding(
            leg.name,
            "likely",
            (said, sums),
            f"A TTL of {ttl:g} s pins more than decode's KV cache holds ({answer.needed} of "
            f"{capacity} tokens): new turns wait for blocks.",
            f"Set kv_transfer.decode_ttl to {int(answer.longest_ttl)}s (it still covers "
            f"{load.turn_gap:g} s between turns) and router.handle_ttl below it.",
        )
    return Finding(
        leg.name,
        "likely",
        (said, sums),
        f"No TTL fits: {answer.in_progress} tokens of conversations in progress, with what turns "
        f"{load.turn_gap:g} s apart need pinned, exceed decode's {capacity} tokens.",
        "Add decode legs or KV cache, use an fp8 KV cache, or admit fewer conversations.",
    )


CHECKS = (
    Check(
        code="PD7060",
        title="Blocks pinned by decode's TTL",
        category=Category.MEMORY_SIZING,
        severity="warning",
        playbook="pinned-blocks-do-not-fit",
        needs=("spec",),
        run=_sizing,
        cheap=True,
    ),
)
