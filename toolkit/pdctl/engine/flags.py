"""The command line of an engine, each word with why it is there."""

from collections.abc import Iterator
from pathlib import Path

from pd_connector.contract import otlp_http_url
from pdctl.engine.lookup import served_name, setting
from pdctl.legs import Flag
from pdctl.spec.model import Leg as LegSpec
from pdctl.spec.model import Observability, Role, Spec
from pdctl.spec.units import format_number


def flags(spec: Spec, base: Path, role: str, settings: Role, leg: LegSpec) -> Iterator[Flag]:
    model, kv = spec.model, spec.kv_transfer
    yield Flag(
        ("--served-model-name", served_name(spec, base)), 'The name clients put into "model".'
    )
    yield Flag(("--dtype", model.dtype), "Type of weights and activations; the same on all legs.")
    tensor_parallel = setting(leg, settings, "tensor_parallel", 1)
    yield Flag(("--tensor-parallel-size", str(tensor_parallel)), "Devices that share the model.")
    ranks = setting(leg, settings, "data_parallel", 1)
    if ranks > 1:
        yield Flag(("--data-parallel-size", str(ranks)), "Data-parallel ranks.")
    yield Flag(
        ("--max-model-len", str(model.max_model_len)),
        "Longest prompt plus answer, in tokens; the same on all legs.",
    )
    max_num_seqs = setting(leg, settings, "max_num_seqs", 0)
    if max_num_seqs:
        yield Flag(("--max-num-seqs", str(max_num_seqs)), "Requests that run at once.")
    if model.kv_cache_dtype != "auto":
        yield Flag(("--kv-cache-dtype", model.kv_cache_dtype), "The same on all legs.")
    utilization = setting(leg, settings, "gpu_memory_utilization", 0.0)
    if utilization:
        yield Flag(
            ("--gpu-memory-utilization", format_number(utilization)), "Share of device memory."
        )
    if kv.block_size:
        yield Flag(
            ("--block-size", str(kv.block_size)),
            "Tokens per KV block; few large blocks make few descriptors per transfer.",
        )
    if setting(leg, settings, "prefix_caching", role == "decode"):
        if role == "prefill":
            yield Flag(("--enable-prefix-caching",), "Prefill keeps a prefix cache of its own.")
    else:
        yield Flag(
            ("--no-enable-prefix-caching",),
            "Nothing is found in this leg's own cache: every reused token comes from decode."
            if role == "prefill"
            else "Decode keeps no prefix cache.",
        )
    if setting(leg, settings, "enforce_eager", False):
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


def _traces_endpoint(seen: Observability) -> str:
    """Where engines send spans; by HTTP they post to exactly this URL."""
    endpoint = seen.otlp_endpoint or ""
    return endpoint if seen.otlp_protocol == "grpc" else otlp_http_url(endpoint)
