"""Dashboard 2: KV on the wire."""

from pd_connector import contract
from pd_connector.contract import Outcome
from pd_connector.telemetry import (
    ENGINE_INFO,
    ENGINE_TRANSFER_BYTES,
    ENGINE_TRANSFER_DESCRIPTORS,
    ENGINE_TRANSFER_FAILURES,
    ENGINE_TRANSFER_POST,
    ENGINE_TRANSFER_SECONDS,
    ROUTER_PREFILL,
    ROUTER_READBACK,
    ROUTER_TTFT,
)
from pdctl.observe.panel import ENGINE, RANGE, RATE_INTERVAL, ROUTER, Board, Panel, Query, Row
from pdctl.observe.promql import mean, quantile, rate, select, total

HIT = f'outcome="{Outcome.HIT.value}"'
NOT_HIT = f'outcome!="{Outcome.HIT.value}"'
PAIR = "direction, leg, peer"


def padded(expr: str) -> str:
    """With prompt bands of one length, so that they sort as numbers do."""
    return f'label_replace({expr}, "prompt", "0$1", "prompt", "([0-9]{{4}})")'


def _over_length(name: str, legend: str, *matchers: str) -> Query:
    return Query(padded(mean(name, RANGE, *ROUTER, *matchers, by="prompt")), legend)


def _speed(by: str) -> str:
    done = rate(f"{ENGINE_TRANSFER_BYTES.name}_sum", RATE_INTERVAL, *ENGINE, by=by)
    took = rate(f"{ENGINE_TRANSFER_SECONDS.name}_sum", RATE_INTERVAL, *ENGINE, by=by)
    return f"{done} / {took}"


def _compute() -> Query:
    """Prefill less the reads in it."""
    whole = mean(ROUTER_PREFILL.name, RANGE, *ROUTER, HIT, by="prompt")
    read = mean(ROUTER_READBACK.name, RANGE, *ROUTER, by="prompt")
    return Query(padded(f"({whole}) - ({read})"), "compute and waiting, read back")


BOARD = Board(
    "pd-transfer",
    "pdctl / KV transfer",
    "KV cache between prefill and decode, in both directions: time, bytes, speed, failures.",
    (
        Row(
            "Over prompt length",
            (
                Panel(
                    "TTFT over prompt length",
                    "s",
                    "Recomputed grows with the prompt, read back hardly does; the gap is what "
                    "readback is worth.",
                    "PdTtftBurnsFast",
                    (
                        _over_length(ROUTER_TTFT.name, "read back", HIT),
                        _over_length(ROUTER_TTFT.name, "recomputed", NOT_HIT),
                    ),
                    "bars",
                    by=("prompt",),
                ),
                Panel(
                    "Prefill time, compute and transfer",
                    "s",
                    "With readback the transfer is a small part of the prefill, and both together "
                    "stay below recomputing at the same length.",
                    "PdTransferFailures",
                    (
                        Query(
                            padded(mean(ROUTER_READBACK.name, RANGE, *ROUTER, by="prompt")),
                            "transfer, read back",
                        ),
                        _compute(),
                        _over_length(ROUTER_PREFILL.name, "compute, recomputed", NOT_HIT),
                    ),
                    "bars",
                    by=("prompt",),
                ),
            ),
        ),
        Row(
            "Reads",
            (
                Panel(
                    "Time of a read",
                    "s",
                    "Tens of milliseconds for gigabytes on a fast fabric. d2p is the readback, "
                    "p2d the way to decode.",
                    "PdProviderFallback",
                    tuple(
                        Query(
                            quantile(
                                share,
                                ENGINE_TRANSFER_SECONDS.name,
                                RATE_INTERVAL,
                                *ENGINE,
                                by="direction",
                            ),
                            f"p{share * 100:.0f} {{{{direction}}}}",
                        )
                        for share in (0.5, 0.99)
                    ),
                ),
                Panel(
                    "Speed of reads",
                    "Bps",
                    "Near what the link can do; one tenth of it is the sign of a tcp fallback or "
                    "of too many descriptors.",
                    "PdProviderFallback",
                    (Query(_speed("direction, backend"), "{{direction}} over {{backend}}"),),
                ),
                Panel(
                    "Bytes read",
                    "Bps",
                    "Follows the load; d2p falls to zero when reuse stops.",
                    "PdReuseStopped",
                    (
                        Query(
                            rate(
                                f"{ENGINE_TRANSFER_BYTES.name}_sum",
                                RATE_INTERVAL,
                                *ENGINE,
                                by="direction",
                            ),
                            "{{direction}}",
                        ),
                    ),
                    "stacked",
                ),
                Panel(
                    "Descriptors of a read",
                    "none",
                    "Hundreds, not tens of thousands: few descriptors make fast reads (block size "
                    "and cache layout decide).",
                    "too-many-descriptors",
                    (
                        Query(
                            mean(
                                ENGINE_TRANSFER_DESCRIPTORS.name,
                                RATE_INTERVAL,
                                *ENGINE,
                                by="direction",
                            ),
                            "{{direction}}",
                        ),
                    ),
                ),
                Panel(
                    "Time to post a read",
                    "s",
                    "A small part of the read's own time; more means too many descriptors.",
                    "too-many-descriptors",
                    (
                        Query(
                            mean(ENGINE_TRANSFER_POST.name, RATE_INTERVAL, *ENGINE, by="direction"),
                            "{{direction}}",
                        ),
                    ),
                ),
                Panel(
                    "Failed reads",
                    "reqps",
                    "Zero.",
                    "PdTransferFailures",
                    (
                        Query(
                            rate(ENGINE_TRANSFER_FAILURES.name, RATE_INTERVAL, *ENGINE, by=PAIR),
                            "{{direction}} {{peer}} to {{leg}}",
                        ),
                        Query(
                            rate(contract.ENGINE_NIXL_FAILED, RATE_INTERVAL, *ENGINE, by="leg"),
                            "counted by vLLM on {{leg}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Pairs and fabric",
            (
                Panel(
                    "Speed per pair",
                    "Bps",
                    "All pairs alike; a slow one has a slow node, rail or placement.",
                    "PdPairUnhealthy",
                    (Query(_speed(PAIR), "{{direction}} {{peer}} to {{leg}}"),),
                ),
                Panel(
                    "Bytes per pair since the legs' start",
                    "bytes",
                    "Sums, not rates: they can be compared with a load's own record.",
                    "PdReuseStopped",
                    (
                        Query(
                            total(f"{ENGINE_TRANSFER_BYTES.name}_sum", *ENGINE, by=PAIR),
                            "bytes",
                        ),
                    ),
                    "table",
                    by=("direction", "peer", "leg"),
                ),
                Panel(
                    "NIXL bytes since the legs' start, counted by vLLM",
                    "bytes",
                    "The same as the sum over a leg's pairs.",
                    "PdReuseStopped",
                    (Query(total(contract.ENGINE_NIXL_BYTES, *ENGINE, by="leg"), "{{leg}}"),),
                    "stat",
                ),
                Panel(
                    "Settings of the engines",
                    "none",
                    "The provider that the spec names, and equal settings on all legs.",
                    "PdProviderFallback",
                    (Query(select(ENGINE_INFO.name, *ENGINE), "{{leg}}"),),
                    "table",
                    by=("leg", *(label for label in ENGINE_INFO.labels)),
                    width=24,
                ),
            ),
        ),
    ),
)
