"""Spec -> legs: environment, command line and ports of every process. Pure."""

import json
import os.path
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pd_connector.contract import (
    CONNECTOR_CLASS,
    CONNECTOR_MODULE,
    HIGH_WATER_KEY,
    SECRET_FILE_VARIABLE,
)
from pd_connector.telemetry import RESOURCE_DEPLOYMENT, RESOURCE_LEG
from pdctl.spec.model import Leg as LegSpec
from pdctl.spec.model import Observability, Role, Spec
from pdctl.spec.units import GIB, format_number
from pdctl.spec.versions import cross_layers, has_kv_rank

NONCE = "{nonce}"
"""Stands in an engine id for the part that a start fills in."""

T = TypeVar("T")


@dataclass(frozen=True)
class Variable:
    """An environment variable and why it is set."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Flag:
    """Words of the command line and why they are there."""

    words: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Leg:
    """One process of a deployment.

    ``checked`` is what the start script compares with the node (:mod:`pd_connector.check`).
    ``listens`` are addresses and ports: HTTP first, then the side channel's. ``kv_config`` is
    vLLM's kv-transfer-config, empty for the router; ``config`` is the router's config file, empty
    for an engine.
    """

    name: str
    role: Literal["prefill", "decode", "router"]
    deployment: str
    host: str
    bind: str
    port: int
    listens: tuple[tuple[str, int], ...]
    venv: str | None
    checked: tuple[str, ...]
    cpus: str
    python: str
    command: tuple[str, ...]
    env: tuple[Variable, ...]
    flags: tuple[Flag, ...]
    kv_config: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    tls: bool = False

    @property
    def url(self) -> str:
        """Base URL at which others reach it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


@dataclass(frozen=True)
class Deployment:
    name: str
    bidirectional: bool
    served_name: str
    engines: tuple[Leg, ...]
    router: Leg

    @property
    def legs(self) -> tuple[Leg, ...]:
        """In the order they are started: engines, then the router."""
        return (*self.engines, self.router)

    def role(self, role: str) -> tuple[Leg, ...]:
        return tuple(leg for leg in self.legs if leg.role == role)


def plan(spec: Spec, base: Path) -> Deployment:
    """The processes of a spec.

    Args:
        base: folder that relative paths of the spec start from (the spec file's).
    """
    on = spec.kv_transfer.bidirectional
    engines = tuple(
        _engine(spec, base, role, index, leg, on)
        for role in ("prefill", "decode")
        for index, leg in enumerate(getattr(spec, role).legs)
    )
    return Deployment(
        spec.name, on, _served_name(spec, base), engines, _router(spec, base, engines, on)
    )


def _path(text: str, base: Path) -> str:
    """A path of the spec as the nodes see it; ``~`` is left to the node's shell."""
    if text.startswith("~"):
        return text
    return os.path.normpath(base.absolute() / text)


def _model(spec: Spec, base: Path) -> str:
    is_path = spec.model.id.startswith(("/", "./", "../", "~"))
    return _path(spec.model.id, base) if is_path else spec.model.id


def _served_name(spec: Spec, base: Path) -> str:
    return spec.model.served_name or _model(spec, base)


def _setting(leg: LegSpec, role: Role, name: str, default: T) -> T:
    """The leg's own value, else its role's, else the default."""
    for section in (leg, role):
        if name in section.model_fields_set and getattr(section, name) is not None:
            value: T = getattr(section, name)
            return value
    return default


def _engine(spec: Spec, base: Path, role: str, index: int, leg: LegSpec, on: bool) -> Leg:
    name = f"{role}-{index}"
    settings: Role = getattr(spec, role)
    ranks = _setting(leg, settings, "data_parallel", 1)
    venv = _path(spec.engine.venv, base) if spec.engine.venv else None
    model = _model(spec, base)
    python = _path(spec.engine.python, base) if spec.engine.python else "python3"
    if spec.engine.device == "cuda" and not spec.engine.python:
        command: tuple[str, ...] = ("vllm", "serve", model)
    else:
        module = "vllm.entrypoints.openai.api_server"
        command = (python, "-m", module, "--model", model)
    cpus = _setting(leg, settings, "cpus", "")
    if cpus:
        command = ("taskset", "-c", cpus, *command)
    return Leg(
        name=name,
        role="prefill" if role == "prefill" else "decode",
        deployment=spec.name,
        host=leg.host,
        bind=leg.listen_host,
        port=leg.port,
        listens=(
            (leg.listen_host, leg.port),
            *((leg.handshake_host, leg.side_channel_port + rank) for rank in range(ranks)),
        ),
        checked=(
            name,
            spec.engine.vllm,
            spec.engine.nixl,
            str(spec.fabric.interfaces or 0),
        ),
        cpus=cpus,
        venv=venv,
        python=python,
        command=command,
        env=(*_secret(spec, base), *_environment(spec, name, role, settings, leg)),
        flags=tuple(_flags(spec, base, role, settings, leg)),
        kv_config=_kv_config(spec, role, index, leg, on),
    )


def _secret(spec: Spec, base: Path) -> Iterator[Variable]:
    if spec.kv_transfer.secret_file:
        yield Variable(
            SECRET_FILE_VARIABLE,
            _path(spec.kv_transfer.secret_file, base),
            "The deployment's secret, the same on every node: legs sign their handles with it.",
        )


def _environment(
    spec: Spec, name: str, role: str, settings: Role, leg: LegSpec
) -> Iterator[Variable]:
    if spec.fabric.provider:
        yield Variable(
            "FI_PROVIDER",
            spec.fabric.provider,
            "libfabric uses this provider or fails; without it NIXL falls back to tcp silently.",
        )
    yield Variable(
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        leg.handshake_host,
        "Where peers do the NIXL handshake with this leg.",
    )
    yield Variable(
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        str(leg.side_channel_port),
        "First handshake port; every data-parallel rank adds its number.",
    )
    if spec.engine.device == "cpu":
        gib = spec.engine.cpu_kv_cache // GIB
        yield Variable("VLLM_CPU_KVCACHE_SPACE", str(gib), "KV cache of this leg, in GiB.")
    if spec.observability.nixl_log_level:
        yield Variable(
            "NIXL_LOG_LEVEL", spec.observability.nixl_log_level, "What NIXL itself logs."
        )
    yield from _trace_environment(spec, name)
    yield from _cross_layer_environment(spec)
    sources = [
        (spec.engine.env, "From engine.env."),
        (spec.fabric.env, "From fabric.env."),
        (settings.env, f"From {role}.env."),
        (leg.env, "From this leg's env."),
    ]
    merged = {
        name: Variable(name, value, why) for env, why in sources for name, value in env.items()
    }
    # In one order whatever the file's is: a spec that only moves keys changes no script.
    yield from (merged[name] for name in sorted(merged))


def _traces_endpoint(seen: Observability) -> str:
    """Where engines send spans; by HTTP they post to exactly this URL."""
    endpoint = seen.otlp_endpoint or ""
    if seen.otlp_protocol == "grpc" or endpoint.rstrip("/").endswith("/v1/traces"):
        return endpoint
    return f"{endpoint.rstrip('/')}/v1/traces"


def _trace_environment(spec: Spec, name: str) -> Iterator[Variable]:
    if spec.observability.otlp_endpoint:
        yield Variable(
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
            spec.observability.otlp_protocol,
            "How spans travel to the collector.",
        )
        yield Variable(
            "OTEL_RESOURCE_ATTRIBUTES",
            f"{RESOURCE_LEG.name}={name},{RESOURCE_DEPLOYMENT.name}={spec.name}",
            "Whose spans they are.",
        )


def _cross_layer_environment(spec: Spec) -> Iterator[Variable]:
    how = cross_layers(spec)
    if how == "key":
        yield Variable(
            "VLLM_USE_V2_MODEL_RUNNER",
            "0",
            "The V2 model runner ignores enable_cross_layers_blocks without a word.",
        )
    elif how == "layout":
        yield Variable(
            "VLLM_KV_CACHE_LAYOUT",
            "BLNHC",
            "Block-major cache: one descriptor moves all layers of a block.",
        )


def _flags(spec: Spec, base: Path, role: str, settings: Role, leg: LegSpec) -> Iterator[Flag]:
    model, kv = spec.model, spec.kv_transfer
    yield Flag(
        ("--served-model-name", _served_name(spec, base)), 'The name clients put into "model".'
    )
    yield Flag(("--dtype", model.dtype), "Type of weights and activations; the same on all legs.")
    tensor_parallel = _setting(leg, settings, "tensor_parallel", 1)
    yield Flag(("--tensor-parallel-size", str(tensor_parallel)), "Devices that share the model.")
    ranks = _setting(leg, settings, "data_parallel", 1)
    if ranks > 1:
        yield Flag(("--data-parallel-size", str(ranks)), "Data-parallel ranks.")
    yield Flag(
        ("--max-model-len", str(model.max_model_len)),
        "Longest prompt plus answer, in tokens; the same on all legs.",
    )
    max_num_seqs = _setting(leg, settings, "max_num_seqs", 0)
    if max_num_seqs:
        yield Flag(("--max-num-seqs", str(max_num_seqs)), "Requests that run at once.")
    if model.kv_cache_dtype != "auto":
        yield Flag(("--kv-cache-dtype", model.kv_cache_dtype), "The same on all legs.")
    utilization = _setting(leg, settings, "gpu_memory_utilization", 0.0)
    if utilization:
        yield Flag(
            ("--gpu-memory-utilization", format_number(utilization)), "Share of device memory."
        )
    if kv.block_size:
        yield Flag(
            ("--block-size", str(kv.block_size)),
            "Tokens per KV block; few large blocks make few descriptors per transfer.",
        )
    if _setting(leg, settings, "prefix_caching", role == "decode"):
        if role == "prefill":
            yield Flag(("--enable-prefix-caching",), "Prefill keeps a prefix cache of its own.")
    else:
        yield Flag(
            ("--no-enable-prefix-caching",),
            "Nothing is found in this leg's own cache: every reused token comes from decode."
            if role == "prefill"
            else "Decode keeps no prefix cache.",
        )
    if _setting(leg, settings, "enforce_eager", False):
        yield Flag(("--enforce-eager",), "No compilation, no CUDA graphs.")
    yield Flag(
        ("--enable-prompt-tokens-details",), "Answers say how many prompt tokens were reused."
    )
    if spec.observability.otlp_endpoint:
        yield Flag(
            ("--otlp-traces-endpoint", _traces_endpoint(spec.observability)), "vLLM's own spans."
        )
    yield Flag(("--host", leg.listen_host), "Address to listen on.")
    yield Flag(("--port", str(leg.port)), "HTTP port.")
    extra = spec.engine.extra_args
    for args, why in (
        (extra.all, "From engine.extra_args.all."),
        (getattr(extra, role), f"From engine.extra_args.{role}."),
        (settings.extra_args, f"From {role}.extra_args."),
        (leg.extra_args, "From this leg's extra_args."),
    ):
        if args:
            yield Flag(tuple(args), why)


def _kv_config(spec: Spec, role: str, index: int, leg: LegSpec, on: bool) -> dict[str, Any]:
    """vLLM's --kv-transfer-config; ``{nonce}`` stays in the engine id for the start to fill."""
    kv = spec.kv_transfer
    pattern = leg.engine_id or kv.engine_id
    engine_id = (
        pattern.replace("{deployment}", spec.name)
        .replace("{role}", role)
        .replace("{leg}", f"{role}-{index}")
    )
    stock_name = "NixlPushConnector" if kv.mode == "push" else "NixlConnector"
    config: dict[str, Any] = {"kv_connector": stock_name}
    if kv.connector == "pdctl":
        config = {"kv_connector": CONNECTOR_CLASS, "kv_connector_module_path": CONNECTOR_MODULE}
    policy = kv.load_failure_policy
    if policy == "auto":
        # A failed load answers HTTP 500 under `fail`; under `recompute` a stock prefill hangs.
        policy = "recompute" if kv.connector == "pdctl" else "fail"
    ttl = int(kv.decode_ttl) if kv.decode_ttl.is_integer() else kv.decode_ttl
    extra: dict[str, Any] = {
        "backends": [kv.backend],
        "kv_recompute_threshold": kv.recompute_threshold,
        "decoder_kv_blocks_ttl": ttl,
        "bidirectional_kv_xfer": on,
    }
    if kv.connector == "pdctl" and role == "decode":
        extra[HIGH_WATER_KEY] = kv.pinned_high_water
    if cross_layers(spec) == "key":
        extra["enable_cross_layers_blocks"] = "True"
    return config | {
        "kv_buffer_device": kv.buffer_device or spec.engine.device,
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "engine_id": engine_id,
        **_ranks(spec, role),
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def _ranks(spec: Spec, role: str) -> dict[str, int]:
    if not has_kv_rank(spec):
        return {}
    return {"kv_rank": 0 if role == "prefill" else 1, "kv_parallel_size": 2}


def _router(spec: Spec, base: Path, engines: tuple[Leg, ...], on: bool) -> Leg:
    router = spec.router
    python = router.python or spec.engine.python
    venv = _path(spec.engine.venv, base) if spec.engine.venv and not python else None
    interpreter = _path(python, base) if python else "python3"
    return Leg(
        name="router-0",
        role="router",
        deployment=spec.name,
        host="127.0.0.1"
        if router.host == "0.0.0.0"
        else "::1"
        if router.host == "::"
        else router.host,
        bind=router.host,
        port=router.port,
        listens=((router.host, router.port),),
        checked=(),
        cpus="",
        venv=venv,
        python=interpreter,
        command=(interpreter, "-m", "pd_router"),
        env=tuple(_secret(spec, base)),
        flags=(),
        kv_config={},
        config=_router_config(spec, base, engines, on),
        tls=router.tls_certificate is not None,
    )


def _router_config(spec: Spec, base: Path, engines: tuple[Leg, ...], on: bool) -> dict[str, Any]:
    """What pd_router reads; its settings.py describes the keys."""
    router, kv, seen = spec.router, spec.kv_transfer, spec.observability
    limits = router.limits

    def file(path: str | None) -> str | None:
        return None if path is None else _path(path, base)

    def legs(role: str) -> dict[str, Any]:
        section: Role = getattr(spec, role)
        own = zip((leg for leg in engines if leg.role == role), section.legs, strict=True)
        return {
            leg.name: {
                "url": leg.url,
                "bidirectional": on,
                "prefix_caching": _setting(settings, section, "prefix_caching", role == "decode"),
            }
            for leg, settings in own
        }

    return {
        "name": "router-0",
        "host": router.host,
        "port": router.port,
        "prefill": legs("prefill"),
        "decode": legs("decode"),
        "connector": kv.connector,
        "bidirectional": on,
        "reuse_proof": None if router.reuse_proof == "auto" else router.reuse_proof,
        "handle_ttl": router.handle_ttl,
        "handle_max_age": router.handle_max_age,
        "decode_ttl": kv.decode_ttl,
        "readback_timeout": router.readback_timeout,
        "recompute_threshold": kv.recompute_threshold,
        "block_size": kv.block_size,
        "conversation_headers": router.conversation_headers,
        "tenant_header": router.tenant_header,
        "route": router.route,
        "append_max_tokens": router.append_max_tokens,
        "max_decode_stall_ms": router.max_decode_stall_ms,
        "rates": router.rates.model_dump(),
        "max_handles": router.max_handles,
        "deployment": spec.name,
        "state": router.state,
        "api_keys_file": file(router.api_keys_file),
        "admin_token_file": file(router.admin_token_file),
        "tls": {"certificate": file(router.tls_certificate), "key": file(router.tls_key)}
        if router.tls_certificate
        else None,
        "drain_timeout": router.drain_timeout,
        "max_body_bytes": limits.max_body,
        "max_header_bytes": limits.max_header,
        "max_requests": limits.max_requests,
        "body_timeout": limits.body_timeout,
        "client_stall_timeout": limits.client_stall_timeout,
        "otlp_endpoint": seen.otlp_endpoint,
        "otlp_protocol": seen.otlp_protocol,
        "trace_conversation_ids": seen.conversation_ids,
    }


def kv_config_json(leg: Leg) -> str:
    """The kv-transfer-config as one line of JSON."""
    return json.dumps(leg.kv_config, separators=(",", ":"))
