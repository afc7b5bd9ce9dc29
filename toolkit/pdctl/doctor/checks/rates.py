"""Transfers that are slower than they need to be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import KV_TRANSFER_METRICS
from pdctl.doctor.checks.settings import LOG_SETTINGS, Setting, config_values, setting, settings
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding

_SLOW_GB_S = 2.0


def _slow_on_one_node(evidence: Evidence) -> Iterator[Answer]:
    nodes = [each for each in settings(evidence, "node", "prefill", "decode")]
    for leg in evidence.legs:
        for path, value in config_values(leg):
            if re.fullmatch(r"nodes?\.(prefill|decode)", path) and not any(
                each.excerpt.text.startswith(path) for each in nodes
            ):
                role = path.rpartition(".")[2]
                shown = Excerpt(f"{leg.name}/config.txt", f"{path}: {value}")
                nodes.append(Setting(role, role, value, shown))
    roles = {each.role for each in nodes}
    one_node = roles >= {"prefill", "decode"} and len({str(each.value) for each in nodes}) == 1
    if not one_node:
        return
    for leg in evidence.role("decode", "prefill"):
        slow = _rate(leg)
        if slow and slow[0] < _SLOW_GB_S:
            yield Finding(
                leg.name,
                "likely",
                (slow[1], *(each.excerpt for each in nodes[:2])),
                f"Both legs are on one node without RDMA between them, and the pull connector "
                f"moves {slow[0]:.1f} GB/s: UCX's cuda_ipc is fast for PUT, its remote GET falls "
                "back to TCP in this layout. The familiar connector name (NixlConnector) reads.",
                "Use NixlPushConnector on both legs (never push on one and pull on the other; no "
                "readback then), or give the pods RDMA or a shared IPC namespace. It is not a "
                "fault of the fabric.",
            )
            return


MANY_DESCRIPTORS = 8000
"""Per transfer; posting them takes longer than moving the bytes does."""


def _descriptors(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.engines:
        found = _descriptor_count(leg)
        if not found or found[0] < MANY_DESCRIPTORS:
            continue
        size = setting(evidence, "block_size", leg.role)
        yield Finding(
            leg.name,
            "likely",
            (found[1], *((size.excerpt,) if size else ())),
            f"A transfer is made of {found[0]:g} descriptors: small KV blocks, each layer and head "
            "group on its own. Posting them takes the time, not the link.",
            "Use larger blocks (pdctl spec: kv_transfer.block_size: 128) and, where the vLLM "
            "version has it, blocks across layers (kv_transfer.cross_layer_blocks). Watch "
            "vllm:nixl_num_descriptors.",
        )
        return


def _descriptor_count(leg: LegEvidence) -> tuple[float, Excerpt] | None:
    hits = leg.hits.get(KV_TRANSFER_METRICS.name)
    for hit in reversed(hits.last) if hits else ():
        if int(hit.groups["transfers"]) and "descriptors" in hit.groups:
            return float(hit.groups["descriptors"]), hit.excerpt
    if leg.metrics:
        total = leg.metrics.value("vllm:nixl_num_descriptors_sum")
        count = leg.metrics.value("vllm:nixl_num_descriptors_count")
        if total and count:
            return total / count, leg.metrics.excerpt("vllm:nixl_num_descriptors_sum")
    return None


def _rate(leg: LegEvidence) -> tuple[float, Excerpt] | None:
    """GB/s of transfers that are large enough to tell."""
    hits = leg.hits.get(KV_TRANSFER_METRICS.name)
    for hit in hits.last if hits else ():
        if int(hit.groups["transfers"]) and float(hit.groups["mb"]) >= 8:
            return float(hit.groups["rate"]) / 1e3, hit.excerpt
    if leg.metrics:
        size = leg.metrics.value("vllm:nixl_bytes_transferred_sum")
        seconds = leg.metrics.value("vllm:nixl_xfer_time_seconds_sum")
        count = leg.metrics.value("vllm:nixl_xfer_time_seconds_count") or 1
        if size and seconds and size / count > 8e6:
            return size / seconds / 1e9, leg.metrics.excerpt("vllm:nixl_bytes_transferred_sum")
    return None


CHECKS = (
    Check(
        "PD4507",
        "Slow reads within one node",
        Category.SILENT_RECOMPUTE,
        "warning",
        "slow-on-one-node",
        _slow_on_one_node,
        needs=("log|metrics",),
        patterns=(KV_TRANSFER_METRICS, *LOG_SETTINGS),
        explains=("PD7504",),
    ),
    Check(
        "PD4514",
        "Transfers of too many descriptors",
        Category.SILENT_RECOMPUTE,
        "warning",
        "too-many-descriptors",
        _descriptors,
        needs=("log|metrics",),
        patterns=(KV_TRANSFER_METRICS, *LOG_SETTINGS),
        premises=("PD4507",),
        explains=("PD7504",),
    ),
)
