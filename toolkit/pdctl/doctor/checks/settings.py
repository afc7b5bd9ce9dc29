"""Settings of the legs, whatever wrote them down."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pdctl.doctor.evidence.config import parse_config
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.model import Excerpt, Pattern

ENGINES = ("prefill", "decode")


NAMES: dict[str, tuple[str, ...]] = {
    "tensor_parallel": (
        "tensor_parallel_size",
        "tensor_parallel",
        "tp_size",
        "tp",
        "tensor-parallel",
    ),
    "data_parallel": ("data_parallel_size", "data_parallel", "dp_size", "dp"),
    "cache_dtype": ("kv_cache_dtype", "cache_dtype"),
    "block_size": ("block_size", "page_size"),
    "max_model_len": ("max_model_len", "context_length", "max_seq_len"),
    "model": ("model", "model_id", "model_path", "model_tag"),
    "revision": ("revision", "model_revision"),
    "chat_template": ("chat_template",),
    "image": ("image",),
    "tokenizer": ("tokenizer", "tokenizer_path"),
    "prefix_caching": ("enable_prefix_caching", "prefix_caching"),
    "connector": ("kv_connector",),
    "role": ("kv_role",),
    "engine_id": ("engine_id",),
    "bidirectional": ("bidirectional_kv_xfer", "bidirectional", "enable_bidirectional_kv"),
    "threshold": ("kv_recompute_threshold", "recompute_threshold"),
    "decode_ttl": ("decoder_kv_blocks_ttl", "decode_ttl"),
    "lease": ("kv_lease_duration",),
    "policy": ("kv_load_failure_policy", "load_failure_policy"),
    "backends": ("backends", "nixl_backends", "backend"),
    "buffer_device": ("kv_buffer_device", "buffer_device"),
    "cross_layer": ("enable_cross_layers_blocks", "cross_layer_blocks"),
    "speculative": ("speculative_config", "speculative_algorithm"),
    "attention": ("attention_backend", "VLLM_ATTENTION_BACKEND"),
    "enforce_compat": ("enforce_handshake_compat",),
    "layout": ("VLLM_KV_CACHE_LAYOUT", "kv_cache_layout"),
    "side_host": ("VLLM_NIXL_SIDE_CHANNEL_HOST", "side_channel_host"),
    "side_port": ("VLLM_NIXL_SIDE_CHANNEL_PORT", "side_channel_port"),
    "telemetry": ("NIXL_TELEMETRY_ENABLE",),
    "provider": ("FI_PROVIDER", "fabric.provider", "provider"),
    "node": ("node", "host_name", "hostname", "nodename"),
}
"""How a setting is called: on command lines, in kv-transfer-config, in specs, in environments."""

_COMMAND_LINE = re.compile(
    r"\b(?:vllm serve|api_server|dynamo\.vllm|sglang\.launch_server|llm serve)\b"
)


@dataclass(frozen=True)
class Setting:
    """``leg`` is the leg it is for; of a leg that is only named by its role, the role."""

    leg: str
    role: str
    value: Any
    excerpt: Excerpt


def settings(evidence: Evidence, name: str, *roles: str) -> list[Setting]:
    """A setting of every leg that states it, the last word of each leg; legs themselves first,
    then what the deployment's configuration says of a role."""
    wanted = roles or ENGINES
    stated: dict[str, Setting] = {}
    for leg in evidence.legs:
        if leg.role in wanted:
            for setting in _of_leg(leg, name):
                stated[leg.name] = setting
    told = {setting.role for setting in stated.values()}
    deployment = evidence.deployment
    if deployment:
        for setting in _of_deployment(deployment, name, wanted):
            if setting.role not in told:
                stated[setting.leg] = setting
    return list(stated.values())


def setting(evidence: Evidence, name: str, *roles: str) -> Setting | None:
    """The first of :func:`settings`."""
    return next(iter(settings(evidence, name, *roles)), None)


def differing(evidence: Evidence, name: str, default: Any = None) -> list[Setting]:
    """The setting of prefill and of decode when they differ, else nothing. A leg whose whole
    command line is known and does not have it has the default."""
    of_role: dict[str, Setting] = {}
    for each in settings(evidence, name):
        of_role.setdefault(each.role, each)
    if default is not None and len(of_role) == 1:
        for leg in evidence.engines:
            if leg.role not in of_role and (implied := whole_command_line(leg)):
                of_role[leg.role] = Setting(leg.name, leg.role, default, implied)
    if len(of_role) < 2:
        return []
    first, second = of_role.values()
    return [] if same(first.value, second.value) else [first, second]


def same(first: Any, second: Any) -> bool:
    return str(first).strip().lower() == str(second).strip().lower()


def whole_command_line(leg: LegEvidence) -> Excerpt | None:
    """The engine's command line, when the configuration holds all of it."""
    if leg.config is None or not _COMMAND_LINE.search(leg.config.text):
        return None
    return Excerpt(f"{leg.name}/config.txt", leg.config.text.strip()[:500])


def is_true(value: Any) -> bool | None:
    """None when it is neither yes nor no."""
    text = str(value).strip().strip("\"'").lower()
    if text in ("true", "1", "y", "yes", "on", "enable", "enabled"):
        return True
    if text in ("false", "0", "n", "no", "off", "disable", "disabled"):
        return False
    return None


def number(value: Any) -> float | None:
    """A number, or a duration such as ``8m`` in seconds."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(ms|s|m|min|h)?\s*", str(value))
    if not match:
        return None
    try:
        plain = float(match[1])
    except ValueError:
        return None
    return plain * {"ms": 0.001, "m": 60, "min": 60, "h": 3600}.get(match[2] or "s", 1)


def backends(evidence: Evidence, *roles: str) -> list[tuple[Setting, set[str]]]:
    """NIXL backends that are asked for, by leg."""
    found = []
    for each in settings(evidence, "backends", *roles):
        names = set(re.findall(r"[A-Z][A-Z0-9_]+", str(each.value)))
        if names:
            found.append((each, names))
    return found


def wants_gpu(evidence: Evidence) -> bool:
    """Whether KV lies in GPU memory as far as is known (an engine on CPU says so)."""
    device = setting(evidence, "buffer_device")
    if device and same(device.value, "cpu"):
        return False
    return not (evidence.spec and evidence.spec.engine.device == "cpu")


def tcp_is_meant(evidence: Evidence) -> bool:
    """Whether somebody chose a socket provider on purpose."""
    provider = setting(evidence, "provider", "prefill", "decode")
    if provider and re.match(r"(tcp|sockets|net|udp|shm)\b", str(provider.value)):
        return True
    return bool(evidence.spec and (evidence.spec.fabric.provider or "").startswith("tcp"))


def efa_is_meant(evidence: Evidence) -> bool:
    provider = setting(evidence, "provider", "prefill", "decode")
    if provider and "efa" in str(provider.value):
        return True
    return bool(evidence.spec and "efa" in (evidence.spec.fabric.provider or ""))


def ucx_only(evidence: Evidence) -> bool:
    """Whether the legs are known to move KV through UCX and no EFA is asked for."""
    if efa_is_meant(evidence):
        return False
    asked = backends(evidence)
    if asked:
        return all("LIBFABRIC" not in names for _, names in asked)
    return bool(evidence.spec and evidence.spec.kv_transfer.backend == "UCX")


def config_values(leg: LegEvidence) -> list[tuple[str, Any]]:
    """Settings of a leg's configuration by path; arguments in lists and texts are settings too."""
    if leg.config is None:
        return []
    found = list(leg.config.values)
    for path, value in leg.config.values:
        words = value if isinstance(value, list) else [value]
        if path and all(isinstance(w, str) for w in words) and any("--" in w for w in words):
            told = parse_config(shlex.join(words) if isinstance(value, list) else words[0])
            found += [(f"{path}.{inner}", each) for inner, each in (told.values if told else ())]
    return found


def _named(leg: LegEvidence, key: str) -> list[tuple[str, Any]]:
    """Values of a setting wherever it stands, camelCase or snake_case."""
    wanted = key.replace("-", "_").lower()
    return [
        (path, value)
        for path, value in config_values(leg)
        if f".{_snake(path)}".endswith(f".{wanted}")
    ]


def _snake(path: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path).replace("-", "_").lower()


def _of_leg(leg: LegEvidence, name: str) -> Iterator[Setting]:
    source = f"{leg.name}/config.txt"
    for key in NAMES[name]:
        for path, value in _named(leg, key):
            if not _foreign(path, leg.role):
                yield Setting(leg.name, leg.role, value, Excerpt(source, f"{path}: {value}"))
        if leg.env is not None and key in leg.env:
            shown = Excerpt(f"{leg.name}/env.txt", f"{key}={leg.env[key]}")
            yield Setting(leg.name, leg.role, leg.env[key], shown)
        for path, value in _flat(leg.settings or {}):
            if path.rpartition(".")[2] == key:
                shown = Excerpt(f"{leg.name}/settings.json", f"{path}: {value}")
                yield Setting(leg.name, leg.role, value, shown)
    yield from _of_log(leg, name)


def _flat(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and depth < 20:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key), depth + 1)
    else:
        yield path, value


def _foreign(path: str, role: str) -> bool:
    """Whether a path speaks of another role, or of a draft model."""
    if re.search(r"speculative_config\.", path.replace("-", "_")):
        return True
    words = set(re.split(r"[^a-z]+", path.lower()))
    others = {"prefill", "decode", "router"} - {role}
    return role not in words and bool(words & others)


def _of_deployment(leg: LegEvidence, name: str, wanted: Iterable[str]) -> Iterator[Setting]:
    for key in NAMES[name]:
        for path, value in _named(leg, key):
            words = set(re.split(r"[^a-z]+", path.lower()))
            named = [role for role in ("prefill", "decode", "router") if role in words]
            shown = Excerpt(f"{leg.name}/config.txt", f"{path}: {value}")
            for role in named or wanted:
                if role in wanted:
                    yield Setting(role, role, value, shown)


# What engines say of their own settings in the log.
CONNECTOR_ACTIVE = Pattern(
    "connector-active",
    ("pd_connector: connector active",),
    r"connector active: role=(?P<role>\S+) bidirectional=(?P<bidirectional>\S+) "
    r"kv_recompute_threshold=(?P<threshold>\S+) decoder_kv_blocks_ttl=(?P<decode_ttl>\S+) "
    r"kv_load_failure_policy=(?P<policy>\S+)",
)
BIDIRECTIONAL_ON = Pattern(
    "bidirectional-on",
    ("Bidirectional KV transfer is enabled",),
    r"Bidirectional KV transfer is enabled and the kv recompute threshold is set to "
    r"(?P<threshold>\d+) tokens?\.?\s*(?:KV blocks on D are released after a TTL of "
    r"(?P<decode_ttl>\d+) seconds)?",
)
NON_DEFAULT_ARGUMENTS = Pattern(
    "non-default-arguments",
    ("non-default args",),
    r"non-default args: (?P<arguments>.*)",
    counted=False,
    longest=1 << 14,
)
LOG_SETTINGS = (CONNECTOR_ACTIVE, BIDIRECTIONAL_ON, NON_DEFAULT_ARGUMENTS)
"""Patterns that every check which reads settings lists among its own."""


def _of_log(leg: LegEvidence, name: str) -> Iterator[Setting]:
    for pattern in (CONNECTOR_ACTIVE, BIDIRECTIONAL_ON):
        for hit in hits.last if (hits := leg.hits.get(pattern.name)) else ():
            if value := hit.groups.get(name):
                yield Setting(leg.name, leg.role, value, hit.excerpt)
            elif name == "bidirectional" and pattern is BIDIRECTIONAL_ON:
                yield Setting(leg.name, leg.role, True, hit.excerpt)
    for hit in hits.last if (hits := leg.hits.get(NON_DEFAULT_ARGUMENTS.name)) else ():
        for key in NAMES[name]:
            # A line may be cut off: only a value that is seen to end is one.
            match = re.search(
                rf"['\"]?\b{re.escape(key)}['\"]?\s*[:=]\s*"
                r"(\[[^\]]*\]|'[^']*'|[^\s,)}'\[]+(?=[\s,)}]))",
                hit.groups["arguments"],
            )
            if match:
                value = match[1].strip("'")
                shown = Excerpt(hit.excerpt.source, f"non-default args: {match[0]}")
                yield Setting(leg.name, leg.role, value, shown)


# Versions -----------------------------------------------------------------------------------
