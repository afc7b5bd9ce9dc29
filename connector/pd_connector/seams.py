"""The parts of vLLM's NIXL connector that pd_connector builds on."""

import inspect
import re
from typing import Any

_SCHEDULER_METHODS = {
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "on_new_request": ("request",),
    "_get_remote_prefill_token_count": ("num_prompt_tokens",),
    "_nixl_handshake_listener": ("encoded_data", "ready_event", "stop_event", "host", "port"),
}
_WORKER_METHODS = {
    "_read_blocks_for_req": ("req_id", "meta"),
    "_is_turn2_read_expired": ("meta",),
    "_handle_failed_transfer": ("req_id", "handle"),
}
SCHEDULER_ATTRIBUTES = (
    "is_bidirectional_kv_xfer_enabled",
    "kv_recompute_threshold",
    "decoder_kv_blocks_ttl",
    "use_host_buffer",
    "_reqs_in_batch",
    "block_size",
)
_FIELD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")
BLOCKS_PROCESSED = "_remote_blocks_processed"
"""Key that vLLM's scheduler sets in a request's kv_transfer_params once its blocks
were asked for or given up; while it is set no read is issued."""


class UnsupportedVllmError(RuntimeError):
    """This vLLM lacks something that pd_connector builds on."""

    def __init__(self, missing: list[str]) -> None:
        super().__init__(
            f"pd_connector does not fit this vLLM ({_vllm_version()}): missing "
            f"{'; '.join(missing)}. Use kv_transfer.connector: stock in the spec "
            '(kv_connector "NixlConnector" without kv_connector_module_path).'
        )


def missing_in(scheduler: Any, worker: Any, connector: Any) -> list[str]:
    """What the classes lack of the methods that pd_connector overrides."""
    missing = [
        *_missing_methods(scheduler, _SCHEDULER_METHODS),
        *_missing_methods(worker, _WORKER_METHODS),
        *_missing_methods(connector, {"build_connector_worker_meta": ()}),
    ]
    alloc = getattr(scheduler, "update_state_after_alloc", None)
    code = getattr(alloc, "__code__", None)
    if code is not None and BLOCKS_PROCESSED not in code.co_consts:
        missing.append(f"{BLOCKS_PROCESSED} in {scheduler.__name__}.update_state_after_alloc")
    return missing


def missing_attributes(scheduler: Any) -> list[str]:
    """What a scheduler instance lacks of the attributes that pd_connector uses."""
    name = type(scheduler).__name__
    return [f"{name}.{key}" for key in SCHEDULER_ATTRIBUTES if not hasattr(scheduler, key)]


def handle_keys(scheduler: Any) -> frozenset[str]:
    """Fields that this vLLM's scheduler puts into its handles, so that a newer vLLM's are known."""
    code = getattr(getattr(scheduler, "request_finished", None), "__code__", None)
    names: set[str] = set()
    for constant in getattr(code, "co_consts", ()):
        words = constant if isinstance(constant, tuple) else (constant,)
        names.update(word for word in words if isinstance(word, str) and _FIELD.fullmatch(word))
    return frozenset(names)


def _missing_methods(cls: Any, methods: dict[str, tuple[str, ...]]) -> list[str]:
    missing = []
    for name, parameters in methods.items():
        method = getattr(cls, name, None)
        if method is None:
            missing.append(f"{cls.__name__}.{name}")
        elif absent := [p for p in parameters if p not in inspect.signature(method).parameters]:
            missing.append(f"{cls.__name__}.{name}({', '.join(absent)})")
    return missing


def _vllm_version() -> str:
    try:
        from vllm import __version__  # noqa: PLC0415
    except ImportError:
        return "version unknown"
    return str(__version__)
