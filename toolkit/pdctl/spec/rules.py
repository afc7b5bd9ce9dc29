"""Rules between fields of a spec: each says where, what is wrong and what to do."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pd_connector.contract import PLUGIN_NAME
from pdctl.spec.model import Leg, Role, Spec
from pdctl.spec.units import format_duration

Where = tuple[str | int, ...]

READ_MARGIN_SECONDS = 5.0
"""vLLM's prefill declines blocks with less time left than this
(``_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`` in ``nixl/pull_worker.py``)."""

CROSS_LAYER_KEY_UNTIL = (0, 29)
"""``enable_cross_layers_blocks`` exists in vLLM before this version; later ones choose the
layout by ``VLLM_KV_CACHE_LAYOUT``."""

OLDEST_VLLM = (0, 21)
"""First version with ``bidirectional_kv_xfer``."""

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
    "--block-size": "kv_transfer.block_size",
    "--kv-transfer-config": "kv_transfer",
    "--otlp-traces-endpoint": "observability.otlp_endpoint",
}
OWNED_ENV = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "the leg's side_channel_host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "the leg's side_channel_port",
    "VLLM_CPU_KVCACHE_SPACE": "engine.cpu_kv_cache",
    "VLLM_KV_CACHE_LAYOUT": "kv_transfer.cross_layer_blocks",
    "VLLM_USE_V2_MODEL_RUNNER": "kv_transfer.cross_layer_blocks",
    "NIXL_LOG_LEVEL": "observability.nixl_log_level",
    "FI_PROVIDER": "fabric.provider",
}
UNKNOWN_LENGTH = 2**40
STAND_INS: dict[str, int | str] = {
    "name": "spec",
    "id": "model",
    "host": "stand-in.invalid",
    "port": 40000,
    "max_model_len": UNKNOWN_LENGTH,
}
"""What takes the place of a required value that is missing or wrong, so that the rules between
the other fields can still be checked. None of them makes a rule fail."""
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_ANY = ("0.0.0.0", "::")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold. ``where`` is the path of the value at fault."""

    where: Where
    message: str
    level: str = "error"
    at_key: bool = False


def vllm_version(spec: Spec) -> tuple[int, ...]:
    """``(0, 29, 0)`` of ``"0.29.0"``; empty when it is not a version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", spec.engine.vllm)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def broken_rules(spec: Spec) -> Iterator[Broken]:
    """Everything that single fields cannot tell."""
    yield from _engine(spec)
    yield from _transfer(spec)
    yield from _ids(spec)
    yield from _lengths(spec)
    yield from _ports(spec)
    yield from _hosts(spec)
    yield from _parallelism(spec)
    yield from _owned(spec)
    yield from _fabric(spec)


def _legs(spec: Spec) -> Iterator[tuple[Where, str, Role, Leg]]:
    for name in ("prefill", "decode"):
        role: Role = getattr(spec, name)
        for index, leg in enumerate(role.legs):
            yield (name, "legs", index), f"{name}-{index}", role, leg


def _engine(spec: Spec) -> Iterator[Broken]:
    engine = spec.engine
    version = vllm_version(spec)
    if not version:
        yield Broken(
            ("engine", "vllm"), f"engine.vllm: {engine.vllm!r} is not a version such as 0.29.0"
        )
    elif version < OLDEST_VLLM:
        yield Broken(
            ("engine", "vllm"),
            f"engine.vllm: {engine.vllm} has no bidirectional transfer; 0.21 or later has",
        )
    if engine.venv and engine.python:
        yield Broken(("engine", "python"), "engine.python and engine.venv: give one of them")
    if engine.device == "cpu" and spec.kv_transfer.buffer_device == "cuda":
        yield Broken(
            ("kv_transfer", "buffer_device"),
            "kv_transfer.buffer_device: cuda needs engine.device: cuda; leave it out or say cpu",
        )
    if engine.device == "cpu" and spec.kv_transfer.cross_layer_blocks is True:
        yield Broken(
            ("kv_transfer", "cross_layer_blocks"),
            "kv_transfer.cross_layer_blocks: vLLM's CPU attention cannot read such blocks; "
            "say auto or false",
        )


def _transfer(spec: Spec) -> Iterator[Broken]:
    kv, router = spec.kv_transfer, spec.router
    if kv.mode == "push" and kv.bidirectional:
        yield Broken(
            ("kv_transfer", "mode"),
            "kv_transfer.mode: push has no bidirectional transfer; say pull, or "
            "bidirectional: false",
        )
    if kv.mode == "push" and kv.connector == "pdctl":
        yield Broken(
            ("kv_transfer", "mode"),
            "kv_transfer.mode: the pdctl connector pulls; push needs connector: stock",
        )
    if kv.connector == "stock" and kv.load_failure_policy == "recompute":
        yield Broken(
            ("kv_transfer", "load_failure_policy"),
            "kv_transfer.load_failure_policy: recompute makes a stock prefill hang on a failed "
            "readback; say fail (the router repeats the prefill), or connector: pdctl",
        )
    if router.handle_ttl >= kv.decode_ttl:
        yield Broken(
            ("router", "handle_ttl"),
            f"router.handle_ttl: {format_duration(router.handle_ttl)} must stay below "
            f"kv_transfer.decode_ttl ({format_duration(kv.decode_ttl)}), or handles outlive "
            "their blocks",
        )
    if kv.bidirectional and kv.decode_ttl <= READ_MARGIN_SECONDS:
        yield Broken(
            ("kv_transfer", "decode_ttl"),
            f"kv_transfer.decode_ttl: prefill declines blocks with less than "
            f"{format_duration(READ_MARGIN_SECONDS)} left, so nothing is ever read back",
            level="warning",
        )
    if kv.bidirectional and kv.recompute_threshold >= spec.model.max_model_len:
        yield Broken(
            ("kv_transfer", "recompute_threshold"),
            f"kv_transfer.recompute_threshold: {kv.recompute_threshold} is no less than "
            f"model.max_model_len ({spec.model.max_model_len}): no prompt would be read back",
        )
    if kv.cross_layer_blocks is True and vllm_version(spec) >= CROSS_LAYER_KEY_UNTIL:
        yield Broken(
            ("kv_transfer", "cross_layer_blocks"),
            "kv_transfer.cross_layer_blocks: vLLM 0.29 and later do it by a block-major cache "
            "layout, which has not been measured; check the answers and the descriptor count",
            level="warning",
        )


def _ids(spec: Spec) -> Iterator[Broken]:
    patterns: dict[str, str] = {}
    for where, name, _, leg in _legs(spec):
        at: Where = (*where, "engine_id") if leg.engine_id else ("kv_transfer", "engine_id")
        pattern = leg.engine_id or spec.kv_transfer.engine_id
        own = ".".join(str(part) for part in at if not isinstance(part, int))
        unknown = set(_PLACEHOLDER.findall(pattern)) - {"deployment", "role", "leg", "nonce"}
        plain = _PLACEHOLDER.sub("", pattern)
        if unknown or not re.fullmatch(r"[A-Za-z0-9._-]*", plain):
            what = f"unknown {{{min(unknown)}}}" if unknown else f"{plain!r} has odd characters"
            yield Broken(
                at,
                f"{own}: {what}; use letters, digits, '.', '_', '-' and {{deployment}}, {{role}}, "
                "{leg}, {nonce}",
            )
            continue
        if "{nonce}" not in pattern:
            yield Broken(
                at,
                f"{own}: {pattern!r} has no {{nonce}}: a leg restarted under its old engine id "
                "is never read from again",
            )
        filled = pattern.replace("{leg}", name).replace("{role}", str(where[0]))
        if filled in patterns:
            yield Broken(
                at,
                f"{own}: {pattern!r} gives {name} the engine id of {patterns[filled]}; "
                "put {leg} into it",
            )
        patterns.setdefault(filled, name)


def _lengths(spec: Spec) -> Iterator[Broken]:
    common = spec.model.max_model_len
    if common >= UNKNOWN_LENGTH:
        return
    for where, name, role, leg in _legs(spec):
        own, at = leg.max_model_len, (*where, "max_model_len")
        if own is None:
            own, at = role.max_model_len, (where[0], "max_model_len")
        if own is not None and own != common:
            yield Broken(
                at,
                f"{name}: max_model_len {own} differs from model.max_model_len ({common}); "
                "a prompt that one role accepts the other refuses",
            )
    block = spec.kv_transfer.block_size
    if block is not None:
        step = 32 if spec.engine.device == "cpu" else 16
        if block % step:
            yield Broken(
                ("kv_transfer", "block_size"),
                f"kv_transfer.block_size: {block} is no multiple of {step}",
            )
        elif block > common:
            yield Broken(
                ("kv_transfer", "block_size"),
                f"kv_transfer.block_size: {block} is more than model.max_model_len ({common})",
            )


def _ports(spec: Spec) -> Iterator[Broken]:
    taken: dict[tuple[str, int], str] = {}

    def take(where: Where, host: str, port: int, what: str) -> Iterator[Broken]:
        key = "loopback" if _LOOPBACK.fullmatch(host) or host in _ANY else host.lower()
        if host == STAND_INS["host"]:
            return
        if port > 65535:
            yield Broken(where, f"{what} would be {port}: ports end at 65535")
        elif (key, port) in taken:
            yield Broken(where, f"{what} is {port} on {host}, already {taken[key, port]}")
        taken.setdefault((key, port), what)

    for where, name, role, leg in _legs(spec):
        ranks = leg.data_parallel if "data_parallel" in leg.model_fields_set else role.data_parallel
        yield from take((*where, "port"), leg.host, leg.port, f"{name}'s port")
        side_host = leg.side_channel_host or leg.host
        for rank in range(ranks):
            what = f"{name}'s side-channel port" + (f" of rank {rank}" if ranks > 1 else "")
            port = leg.side_channel_port + rank
            clash = list(take((*where, "side_channel_port"), side_host, port, what))
            yield from clash
            if clash:
                break
    yield from take(("router", "port"), spec.router.host, spec.router.port, "the router's port")


def _hosts(spec: Spec) -> Iterator[Broken]:
    hosts = {leg.host for _, _, _, leg in _legs(spec)}
    far = {host for host in hosts if not _LOOPBACK.fullmatch(host)} - {STAND_INS["host"]}
    for where, name, _, leg in _legs(spec):
        for key, host in (("host", leg.host), ("side_channel_host", leg.side_channel_host)):
            at = (*where, key)
            if host in _ANY:
                yield Broken(
                    at, f"{name}: {key} {host} is no address others can reach; that goes into bind"
                )
            elif host and far and _LOOPBACK.fullmatch(host):
                yield Broken(
                    at,
                    f"{name}: {key} {host} is reached from its own machine alone, but other legs "
                    f"are on {min(far)}",
                )


def _parallelism(spec: Spec) -> Iterator[Broken]:
    sizes: dict[str, int] = {}
    for where, name, role, leg in _legs(spec):
        own = "tensor_parallel" in leg.model_fields_set
        size = leg.tensor_parallel if own else role.tensor_parallel
        at: Where = (*where, "tensor_parallel") if own else (where[0], "tensor_parallel")
        for other, other_size in sizes.items():
            if max(size, other_size) % min(size, other_size):
                yield Broken(
                    at,
                    f"{name}: tensor_parallel {size} and {other}'s {other_size}: NIXL needs one "
                    "to be a multiple of the other",
                )
                break
        sizes[name] = size


def _owned(spec: Spec) -> Iterator[Broken]:
    lists: list[tuple[Where, list[str]]] = [
        (("engine", "extra_args", "all"), spec.engine.extra_args.all),
        (("engine", "extra_args", "prefill"), spec.engine.extra_args.prefill),
        (("engine", "extra_args", "decode"), spec.engine.extra_args.decode),
        (("prefill", "extra_args"), spec.prefill.extra_args),
        (("decode", "extra_args"), spec.decode.extra_args),
    ]
    envs: list[tuple[Where, dict[str, str]]] = [
        (("engine", "env"), spec.engine.env),
        (("fabric", "env"), spec.fabric.env),
        (("prefill", "env"), spec.prefill.env),
        (("decode", "env"), spec.decode.env),
    ]
    for where, _, _, leg in _legs(spec):
        lists.append(((*where, "extra_args"), leg.extra_args))
        envs.append(((*where, "env"), leg.env))
    for where, args in lists:
        for index, arg in enumerate(args):
            flag = arg.split("=", 1)[0].replace("_", "-")
            if flag in OWNED_FLAGS:
                yield Broken((*where, index), f"{flag} is set from {OWNED_FLAGS[flag]}: set that")
    for where, env in envs:
        for key, value in env.items():
            if key in OWNED_ENV:
                yield Broken(
                    (*where, key), f"{key} is set from {OWNED_ENV[key]}: set that", at_key=True
                )
            elif key == "VLLM_PLUGINS" and PLUGIN_NAME not in value.split(","):
                yield Broken(
                    (*where, key),
                    f"VLLM_PLUGINS lists the only plugins vLLM loads and lacks {PLUGIN_NAME}: "
                    "streams would carry no handle",
                )


def _fabric(spec: Spec) -> Iterator[Broken]:
    for key in spec.fabric.env:
        if not key.startswith(("FI_", "UCX_", "NIXL_")):
            yield Broken(
                ("fabric", "env", key),
                f"fabric.env: {key} is no FI_, UCX_ or NIXL_ variable; engine.env is for others",
                at_key=True,
            )
    if spec.fabric.provider and spec.kv_transfer.backend == "UCX":
        yield Broken(
            ("fabric", "provider"),
            f"fabric.provider: {spec.fabric.provider} is libfabric's; with backend: UCX it has no "
            "effect (leave it out, or say backend: LIBFABRIC)",
        )
