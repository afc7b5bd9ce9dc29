"""What the engines counted of one turn, which nothing else ran beside."""

from typing import Any

from pdctl.bench import engines
from pdctl.bench.engines import Counters, EngineLeg, gain
from pdctl.bench.records import Row


def with_counters(
    row: Row, before: dict[str, Counters], after: dict[str, Counters] | None, legs: list[EngineLeg]
) -> Row:
    """What the engines counted of this turn alone, which nothing else ran beside."""
    if after is None:
        return row
    values: dict[str, Any] = dict(vars(row))

    def total(role: str, name: str) -> float:
        return sum(
            gain(before[leg.name], after[leg.name], name) for leg in legs if leg.role == role
        )

    read = int(total("prefill", engines.EXTERNAL))
    if values["tokens_read"] is None and total("prefill", engines.COMPUTED):
        values["tokens_read"] = read
    values["computed_tokens"] = int(total("prefill", engines.COMPUTED))
    values["cached_tokens"] = int(total("prefill", engines.LOCAL))
    values["decode_cached_tokens"] = int(total("decode", engines.LOCAL))
    if total("prefill", "nixl_transfers"):
        values["read_ms"] = rounded(total("prefill", "nixl_seconds") * 1000)
        values["read_post_ms"] = rounded(total("prefill", "nixl_post_seconds") * 1000)
        values["read_bytes"] = int(total("prefill", "nixl_bytes"))
        values["read_descriptors"] = int(total("prefill", "nixl_descriptors"))
    if total("decode", "nixl_transfers"):
        values["pull_ms"] = rounded(total("decode", "nixl_seconds") * 1000)
        values["pull_bytes"] = int(total("decode", "nixl_bytes"))
    for role, name, key in (
        ("prefill", "request_seconds", "prefill_engine_ms"),
        ("decode", "ttft_seconds", "decode_ttft_ms"),
    ):
        if seconds := total(role, name):
            values[key] = rounded(seconds * 1000)
    usage = [after[leg.name].get("kv_usage") for leg in legs if leg.role == "decode"]
    values["decode_kv_usage"] = max((value for value in usage if value is not None), default=None)
    return Row(**values)


def prompt_tokens(before: Counters, after: Counters) -> float:
    return sum(
        gain(before, after, name) for name in (engines.COMPUTED, engines.LOCAL, engines.EXTERNAL)
    )


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
