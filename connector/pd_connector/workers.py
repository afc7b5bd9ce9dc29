"""What engine processes tell the API server: a method that vLLM's workers gain.

The API server calls it with ``collective_rpc``; vLLM's general plugins are loaded in the
processes that run it.
"""

from typing import Any

SETTINGS_RPC = "pd_connector_settings"


def install() -> str | None:
    """Give vLLM's workers the method; the reason when they cannot have it."""
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    setattr(WorkerBase, SETTINGS_RPC, worker_settings)
    return None


def worker_settings(worker: Any) -> dict[str, Any]:
    """What only a worker's process knows, as JSON; {} where it moves no KV."""
    from vllm.distributed.kv_transfer import (  # noqa: PLC0415
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    from pd_connector.kvcache import why_not_read_back  # noqa: PLC0415
    from pd_connector.transport import transport_facts  # noqa: PLC0415

    if not has_kv_transfer_group():
        return {}
    connector = get_kv_transfer_group().connector_worker
    if connector is None:
        return {}
    backends = list(getattr(connector, "nixl_backends", ()))
    try:
        metadata = connector.nixl_wrapper.get_agent_metadata()
    except Exception:
        metadata = b""
    return {
        "rank": getattr(connector, "tp_rank", 0),
        "why_no_readback": why_not_read_back(connector, connector.kv_cache_config),
        **transport_facts(backends, metadata),
    }
