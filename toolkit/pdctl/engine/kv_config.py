"""vLLM's kv-transfer-config."""

from typing import Any

from pd_connector.contract import CONNECTOR_CLASS, CONNECTOR_MODULE, HIGH_WATER_KEY
from pdctl.spec.model import Leg as LegSpec
from pdctl.spec.model import Spec
from pdctl.spec.versions import cross_layers, has_kv_rank


def kv_config(spec: Spec, role: str, index: int, leg: LegSpec, on: bool) -> dict[str, Any]:
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
