"""Environment variables of an engine, each with why it is set."""

from collections.abc import Iterator
from pathlib import Path

from pd_connector.contract import SECRET_FILE_VARIABLE
from pd_connector.telemetry import RESOURCE_DEPLOYMENT, RESOURCE_LEG
from pdctl.engine.lookup import whole_path
from pdctl.legs import Variable
from pdctl.spec.model import Leg as LegSpec
from pdctl.spec.model import Role, Spec
from pdctl.spec.units import GIB
from pdctl.spec.versions import cross_layers


def secret(spec: Spec, base: Path) -> Iterator[Variable]:
    if spec.kv_transfer.secret_file:
        yield Variable(
            SECRET_FILE_VARIABLE,
            whole_path(spec.kv_transfer.secret_file, base),
            "The deployment's secret, the same on every node: legs sign their handles with it.",
        )


def environment(
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
