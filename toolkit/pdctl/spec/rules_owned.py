"""Rules for free text: arguments and variables that the spec sets by other means, or that cannot
arrive as they were meant."""

import re
from collections.abc import Iterator

from pd_connector.contract import PLUGIN_NAME, SECRET_FILE_VARIABLE
from pdctl.spec.faults import Broken, Where, shown
from pdctl.spec.model import Spec
from pdctl.spec.rules_legs import legs
from pdctl.spec.versions import cross_layers

OWNED_FLAGS = {
    "--model": "model.id",
    "--served-model-name": "model.served_name",
    "--dtype": "model.dtype",
    "--max-model-len": "model.max_model_len",
    "--kv-cache-dtype": "model.kv_cache_dtype",
    "--host": "the leg's bind",
    "--port": "the leg's port",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--data-parallel-size": "data_parallel",
    "-dp": "data_parallel",
    "--max-num-seqs": "max_num_seqs",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--enable-prefix-caching": "prefix_caching",
    "--no-enable-prefix-caching": "prefix_caching",
    "--enforce-eager": "enforce_eager",
    "--no-enforce-eager": "enforce_eager",
    "--block-size": "kv_transfer.block_size",
    "--kv-transfer-config": "kv_transfer",
    "--otlp-traces-endpoint": "observability.otlp_endpoint",
}
OWNED_ENV = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "the leg's side_channel_host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "the leg's side_channel_port",
    "VLLM_CPU_KVCACHE_SPACE": "engine.cpu_kv_cache",
    "NIXL_LOG_LEVEL": "observability.nixl_log_level",
    "FI_PROVIDER": "fabric.provider",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "observability.otlp_endpoint",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "observability.otlp_protocol",
    "PATH": "engine.venv",
    SECRET_FILE_VARIABLE: "kv_transfer.secret_file",
}
_CROSS_LAYER_ENV = {
    "key": {"VLLM_USE_V2_MODEL_RUNNER": "kv_transfer.cross_layer_blocks"},
    "layout": {"VLLM_KV_CACHE_LAYOUT": "kv_transfer.cross_layer_blocks"},
    "off": {},
}
START_SCRIPT_ENV = frozenset(
    "BASHOPTS BASHPID BASH_ENV BASH_VERSINFO DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME "
    "GROUPS IFS LINENO POSIXLY_CORRECT PPID RANDOM SECONDS SHELLOPTS SPT_NOENV SRANDOM "
    "UID _ args kv_transfer_config nonce".split()
)
"""What the start script or its shell sets itself."""
_EXPANSION = re.compile(r"\$\{?[A-Za-z_]")


def broken_by_owned(spec: Spec) -> Iterator[Broken]:
    for where, args in _argument_lists(spec):
        for index, arg in enumerate(args):
            yield from _argument((*where, index), arg)
    owned = OWNED_ENV | _CROSS_LAYER_ENV[cross_layers(spec)]
    for where, env in _environments(spec):
        for key, value in env.items():
            yield from _variable((*where, key), key, value, owned)


def _argument_lists(spec: Spec) -> Iterator[tuple[Where, list[str]]]:
    extra = spec.engine.extra_args
    yield ("engine", "extra_args", "all"), extra.all
    yield ("engine", "extra_args", "prefill"), extra.prefill
    yield ("engine", "extra_args", "decode"), extra.decode
    yield ("prefill", "extra_args"), spec.prefill.extra_args
    yield ("decode", "extra_args"), spec.decode.extra_args
    for where, _, _, leg in legs(spec):
        yield (*where, "extra_args"), leg.extra_args


def _environments(spec: Spec) -> Iterator[tuple[Where, dict[str, str]]]:
    yield ("engine", "env"), spec.engine.env
    yield ("fabric", "env"), spec.fabric.env
    yield ("prefill", "env"), spec.prefill.env
    yield ("decode", "env"), spec.decode.env
    for where, _, _, leg in legs(spec):
        yield (*where, "env"), leg.env


def _argument(where: Where, arg: str) -> Iterator[Broken]:
    match = re.match(r"--?[A-Za-z][A-Za-z0-9_-]*", arg)
    if not match:
        return
    flag = match[0].replace("_", "-")
    if flag in OWNED_FLAGS:
        yield Broken(where, f"{flag} is set from {OWNED_FLAGS[flag]}: set that")
    elif re.match(r"\s+\S", arg[match.end() :]):
        yield Broken(where, f"{flag} and its value are one argument here; write two list entries")


def _variable(where: Where, key: str, value: str, owned: dict[str, str]) -> Iterator[Broken]:
    if key in owned:
        yield Broken(where, f"{key} is set from {owned[key]}: set that", at_key=True)
    elif key in START_SCRIPT_ENV or key.startswith("PDCTL_"):
        yield Broken(where, f"{key} is set by the start script's shell; leave it out", at_key=True)
    elif key == "VLLM_PLUGINS" and PLUGIN_NAME not in value.split(","):
        yield Broken(
            where,
            f"VLLM_PLUGINS lists the only plugins vLLM loads and lacks {PLUGIN_NAME}: "
            "streams would carry no handle; add it",
        )
    elif _EXPANSION.search(value):
        yield Broken(
            where,
            f"{key} arrives as it stands here: {shown(value)} is not expanded; "
            "write the whole value",
            level="warning",
        )
