"""What evidence says of a leg's settings and state, whichever source says it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pd_connector import contract, telemetry
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.evidence.web import Answer, parse_answer
from pdctl.doctor.model import Excerpt, Pattern

CONNECTOR_ACTIVE = Pattern(
    "pd-connector-active",
    (contract.LOG_CONNECTOR_ACTIVE,),
    r"bidirectional=(?P<bidirectional>\S+) kv_recompute_threshold=(?P<threshold>\S+).{0,40}?"
    r"decoder_kv_blocks_ttl=(?P<ttl>\S+).{0,40}?kv_load_failure_policy=(?P<policy>\S+)",
)
STREAM_ACTIVE = Pattern("pd-stream-active", (contract.LOG_STREAM_ACTIVE,))
STREAM_INACTIVE = Pattern(
    "pd-stream-inactive",
    (contract.LOG_STREAM_INACTIVE,),
    re.escape(contract.LOG_STREAM_INACTIVE) + r": (?P<reason>.*)",
)
PATTERNS = (CONNECTOR_ACTIVE, STREAM_ACTIVE, STREAM_INACTIVE)


@dataclass(frozen=True)
class Setting:
    """A value and where it was found."""

    value: Any
    excerpt: Excerpt


@dataclass(frozen=True)
class State:
    """What ``pdctl status`` says of a leg. ``phase``: healthy, starting, unhealthy, dead, or
    "not started". ``earlier_ends`` are the Unix times at which its earlier starts ended."""

    phase: str
    detail: str
    fatal: str
    started_at: float | None
    earlier_ends: tuple[float, ...]
    excerpt: Excerpt


# Names of a setting: in a kv-transfer-config, in our log line, at our settings endpoint.
_KEYS = {
    "bidirectional": ("bidirectional_kv_xfer", "bidirectional", "bidirectional"),
    "threshold": ("kv_recompute_threshold", "threshold", "recompute_threshold"),
    "decode_ttl": ("decoder_kv_blocks_ttl", "ttl", "decode_ttl"),
    "policy": ("kv_load_failure_policy", "policy", "load_failure_policy"),
}
_DEFAULTS = {"bidirectional": False, "threshold": 64, "decode_ttl": 480}
"""vLLM's, for a leg whose kv-transfer-config is known and does not say."""


def setting(leg: LegEvidence, name: str) -> Setting | None:
    """One of bidirectional, threshold, decode_ttl and policy, as it is in effect.

    What the leg says itself goes before its command line. None: nothing tells.
    """
    key, short, ours = _KEYS[name]
    if leg.settings is not None:
        for path, value in _flat(leg.settings):
            if path.rpartition(".")[2] in (key, name, ours):
                return Setting(
                    plain(value),
                    Excerpt(
                        f"{leg.name}{contract.ENGINE_SETTINGS_PATH}", f"{path}: {json.dumps(value)}"
                    ),
                )
    hits = leg.hits.get(CONNECTOR_ACTIVE.name)
    found = state(leg)
    # The log of a leg that has ended tells what it was set to, not what it is.
    ended = found is not None and found.phase in ("not started", "dead")
    if hits and not ended and (said := hits.last[-1].groups.get(short)) is not None:
        return Setting(plain(said), hits.last[-1].excerpt)
    if leg.metrics and (label := leg.metrics.label(telemetry.ENGINE_INFO.name, name)) is not None:
        return Setting(
            plain(label), leg.metrics.excerpt(telemetry.ENGINE_INFO.name, **{name: label})
        )
    config = server_config(leg)
    if config is not None and key in config:
        value = config[key]
        return Setting(plain(value), Excerpt(f"{leg.name}/server_info", f"{key}: {value}"))
    if leg.config and key in leg.config:
        value = leg.config.get(key)
        return Setting(plain(value), Excerpt(f"{leg.name}/config.txt", f"{key}: {value}"))
    if leg.config and name in _DEFAULTS and "kv_connector" in leg.config:
        return Setting(
            _DEFAULTS[name], Excerpt(f"{leg.name}/config.txt", f"{key} is not set: vLLM's default")
        )
    return None


def server_config(leg: LegEvidence) -> dict[str, Any] | None:
    """The kv_transfer_config that /server_info tells, flat; None without it."""
    answer = answer_of(leg, "/server_info")
    if answer is None or answer.status != 200:
        return None
    try:
        found = {path.rpartition(".")[2]: value for path, value in _flat(json.loads(answer.body))}
    except (ValueError, RecursionError):
        return None
    return found if "kv_connector" in found else None


def plain(value: Any) -> Any:
    """A value as Python has it: ``"True"`` and ``"on"`` are True, ``"64"`` is 64."""
    if not isinstance(value, str):
        return value
    lowered = value.strip().rstrip(",").lower()
    if lowered in ("true", "on", "yes"):
        return True
    if lowered in ("false", "off", "no"):
        return False
    try:
        return int(lowered)
    except ValueError:
        try:
            return float(lowered)
        except ValueError:
            return value.strip().rstrip(",")


def state(leg: LegEvidence) -> State | None:
    """None when ``pdctl status`` is not among the evidence."""
    command = leg.command(r"^pdctl status .*--json")
    if command is None:
        return None
    try:
        row = json.loads(command.output)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    started = row.get("started_at")
    shown = {
        key: row[key] for key in ("phase", "pid", "detail", "last_line") if row.get(key) is not None
    }
    return State(
        str(row.get("phase", "")),
        str(row.get("detail", "")),
        str(row.get("fatal", "")),
        started if isinstance(started, float) else None,
        tuple(end for end in row.get("earlier_ends", ()) if isinstance(end, float)),
        Excerpt(command.source, " ".join(f"{key}={value}" for key, value in shown.items())),
    )


def answers(leg: LegEvidence) -> Iterator[Answer]:
    """Answers to GETs that pdctl collected."""
    yield from (answer for capture in leg.http if (answer := parse_answer(capture)))


def answer_of(leg: LegEvidence, path: str) -> Answer | None:
    return next((a for a in answers(leg) if a.path.partition("?")[0] == path), None)


def health(leg: LegEvidence) -> Answer | None:
    return answer_of(leg, "/health")


def backends(leg: LegEvidence) -> list[str]:
    """NIXL backends of a leg's kv-transfer-config; empty when it is not known."""
    value = leg.config.get("backends") if leg.config else None
    if isinstance(value, str):
        return re.findall(r"\w+", value)
    return [str(each) for each in value] if isinstance(value, list) else []


def on_libfabric(leg: LegEvidence, evidence: Evidence) -> bool:
    if found := backends(leg):
        return "LIBFABRIC" in found
    return evidence.spec is not None and evidence.spec.kv_transfer.backend == "LIBFABRIC"


def provider(leg: LegEvidence, evidence: Evidence) -> str | None:
    """The libfabric provider that the leg is told to use, None when it is left to libfabric."""
    if leg.env is not None and "FI_PROVIDER" in leg.env:
        return leg.env["FI_PROVIDER"]
    return evidence.spec.fabric.provider if evidence.spec else None


def expects_efa(leg: LegEvidence, evidence: Evidence) -> bool:
    """Whether the leg is meant to move KV over EFA."""
    said = provider(leg, evidence)
    if said is not None:
        return "efa" in said and on_libfabric(leg, evidence)
    return on_libfabric(leg, evidence)


def _flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and depth < 20:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    else:
        yield prefix, value
