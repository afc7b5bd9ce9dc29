"""The ``KV Transfer metrics:`` lines of an engine's log.

vLLM's connector logs them at intervals, on the side that started the transfers: prefill's log
holds the D->P reads, decode's the P->D reads (``nixl/stats.py``, ``reduce``).
"""

import re
from typing import Any

MARK = "KV Transfer metrics:"

_FIELDS = {
    "Num successful transfers": ("transfers", int),
    "Avg xfer time (ms)": ("mean_ms", float),
    "P90 xfer time (ms)": ("p90_ms", float),
    "Avg post time (ms)": ("post_mean_ms", float),
    "P90 post time (ms)": ("post_p90_ms", float),
    "Avg MB per transfer": ("mean_mb", float),
    "Throughput (MB/s)": ("mb_per_s", float),
    "Avg number of descriptors": ("descriptors", float),
}
_PAIR = re.compile(r"([A-Z][^=,]*)=([-+0-9.eEinfa]+)")
_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")

DIRECTIONS = {"prefill": "D->P", "decode": "P->D"}
"""By the role of the leg whose log it is."""


def transfer_metrics(line: str) -> dict[str, Any] | None:
    """The numbers of one line (milliseconds, MB as the engine means it); None for other lines."""
    place = line.find(MARK)
    if place < 0:
        return None
    numbers: dict[str, Any] = {}
    for name, text in _PAIR.findall(line[place + len(MARK) :]):
        known = _FIELDS.get(name.strip())
        if known is None:
            continue
        key, kind = known
        try:
            numbers[key] = kind(float(text))
        except (ValueError, OverflowError):
            continue
    if "transfers" not in numbers:
        return None
    if at := _TIME.search(line[:place]):
        numbers["at"] = at.group(1)
    return numbers


def transfers_in(text: str, leg: str, role: str) -> list[dict[str, Any]]:
    """Every such line of a leg's log, with the leg and the direction it tells of."""
    found = []
    for line in text.splitlines():
        numbers = transfer_metrics(line)
        if numbers is not None:
            found.append({"leg": leg, "direction": DIRECTIONS.get(role, "?"), **numbers})
    return found
