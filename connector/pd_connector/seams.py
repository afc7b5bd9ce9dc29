"""The parts of vLLM's NIXL connector that pd_connector builds on."""

import inspect
import os
import re
from collections.abc import Mapping
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
    "_pop_done_transfers": ("transfers",),
    "start_load_kv": ("metadata",),
    "get_finished": (),
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


KNOWN_FROM, KNOWN_TO = (0, 26), (0, 32)
"""vLLM's releases whose connector was read; tests run on 0.29.0 and 0.32.0. Before 0.26 prefill
does not check the deadline of decode's blocks."""
UNKNOWN_ALLOWED = "PD_UNKNOWN_VLLM"
"""Environment variable: with ``allow`` other releases are tried, if they have what is needed."""

_STOCK = (
    "Use kv_transfer.connector: stock in the spec "
    '(kv_connector "NixlConnector" without kv_connector_module_path).'
)


class UnsupportedVllmError(RuntimeError):
    """This vLLM lacks something that pd_connector builds on."""

    def __init__(self, missing: list[str]) -> None:
        super().__init__(
            f"pd_connector does not fit this vLLM ({_vllm_version()}): missing "
            f"{'; '.join(missing)}. {_STOCK}"
        )


class UnknownVllmError(RuntimeError):
    """This vLLM may have changed what pd_connector builds on without it being noticed."""

    def __init__(self, version: str) -> None:
        known = " to ".join(".".join(map(str, release)) for release in (KNOWN_FROM, KNOWN_TO))
        super().__init__(
            f"pd_connector knows vLLM {known}, and this is {version}: {UNKNOWN_ALLOWED}=allow "
            f"tries it all the same. {_STOCK}"
        )


def is_known(version: str | None = None) -> bool:
    """Whether a release of vLLM, by default the installed one, is one of the known."""
    release = re.match(r"(\d+)\.(\d+)", version or _vllm_version())
    return release is not None and (KNOWN_FROM <= (int(release[1]), int(release[2])) <= KNOWN_TO)


def refuse_unknown(environ: Mapping[str, str] = os.environ, version: str | None = None) -> None:
    """Raise UnknownVllmError on a release that is not known, unless that is allowed."""
    version = version or _vllm_version()
    if not is_known(version) and environ.get(UNKNOWN_ALLOWED) != "allow":
        raise UnknownVllmError(version)


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


def handle_keys(scheduler: Any) -> frozenset[str] | None:
    """Fields that this vLLM's scheduler puts into its handles; None on an unknown release, which
    may put further ones there elsewhere."""
    if not is_known():
        return None
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
