"""What a leg really runs with, for its start-up log and for ``GET /pd/settings``."""

from importlib import metadata
from typing import Any

from pd_connector.check import installed
from pd_connector.contract import CONNECTOR_MODULE, LOG_CONNECTOR_ACTIVE

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def leg_settings(vllm_config: Any) -> dict[str, Any]:
    """The settings that are known wherever vLLM's configuration is."""
    config = vllm_config.kv_transfer_config
    extra = config.get_from_extra_config
    cache = vllm_config.cache_config
    ours = getattr(config, "kv_connector_module_path", None) == CONNECTOR_MODULE
    return {
        "role": _ROLES.get(config.kv_role, config.kv_role),
        "engine_id": config.engine_id,
        "connector": "pdctl" if ours else "stock",
        "connector_class": config.kv_connector,
        "versions": {
            "pdctl": _version("pdctl"),
            "vllm": installed("vllm"),
            "nixl": installed("nixl"),
        },
        "bidirectional": extra("bidirectional_kv_xfer", False) is True,
        "recompute_threshold": extra("kv_recompute_threshold", 64),
        "decode_ttl": extra("decoder_kv_blocks_ttl", 480),
        "prefill_lease": extra("kv_lease_duration", 30),
        "load_failure_policy": config.kv_load_failure_policy,
        "backends": list(extra("backends", ["UCX"])),
        "buffer_device": config.kv_buffer_device,
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks,
        "kv_cache_dtype": str(cache.cache_dtype),
        "max_model_len": vllm_config.model_config.max_model_len,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        "data_parallel": vllm_config.parallel_config.data_parallel_size,
    }


def announce(logger: Any, vllm_config: Any, reads_back: bool, signs: bool) -> None:
    """Tell the start-up log what the connector does."""
    settings = leg_settings(vllm_config)
    policy = settings["load_failure_policy"]
    logger.info(
        "%s: role=%s bidirectional=%s kv_recompute_threshold=%s "
        "decoder_kv_blocks_ttl=%s kv_load_failure_policy=%s readback=%s "
        "signed=%s backends=%s block_size=%s pdctl=%s vllm=%s nixl=%s",
        LOG_CONNECTOR_ACTIVE,
        vllm_config.kv_transfer_config.kv_role,
        settings["bidirectional"],
        settings["recompute_threshold"],
        settings["decode_ttl"],
        policy,
        "on" if reads_back else "off",
        "on" if signs else "off",
        ",".join(settings["backends"]),
        settings["block_size"],
        *settings["versions"].values(),
    )
    if policy != "recompute":
        logger.warning(
            "pd_connector: kv_load_failure_policy is %s, not recompute: a failed read "
            "fails its request",
            policy,
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
