"""``GET /pd/settings`` on an engine: what the leg really runs with. Read only, no secrets.

The schema is in docs/engine-http.md.
"""

import json
from typing import Any

from pd_connector.contract import ENGINE_SETTINGS_PATH, LOG_SETTINGS
from pd_connector.counters import begin, observe
from pd_connector.secret import load_secret
from pd_connector.settings import leg_settings
from pd_connector.telemetry import ENGINE_INFO, ENGINE_REJECTED
from pd_connector.workers import SETTINGS_RPC

SCHEMA = 1
RPC_SECONDS = 10.0


class SettingsEndpoint:
    """The route and what it tells."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._base: dict[str, Any] = {}

    def add_route(self, app: Any) -> None:
        """Register the route on an API server (FastAPI)."""
        from fastapi.responses import JSONResponse  # noqa: PLC0415

        async def settings() -> JSONResponse:
            found = await self.settings()
            return JSONResponse(found or {"detail": "no KV transfer"}, 200 if found else 404)

        app.add_api_route(ENGINE_SETTINGS_PATH, settings, methods=["GET"], include_in_schema=False)

    async def start(self, engine_client: Any) -> None:
        """Once the engine runs, or with None where there is none."""
        config = getattr(engine_client, "vllm_config", None)
        if getattr(config, "kv_transfer_config", None) is None:
            return
        self._engine = engine_client
        self._base = {"schema": SCHEMA} | leg_settings(config)
        self._base |= {"signed": self._base["connector"] == "pdctl" and load_secret() is not None}
        self._base |= {"params_checked": _checks_params()}
        settings = await self.settings()
        _logger().info("%s: %s", LOG_SETTINGS, json.dumps(settings, separators=(",", ":")))
        if self._base["params_checked"]:
            begin(ENGINE_REJECTED)
        observe(ENGINE_INFO, *(_label(settings, name) for name in ENGINE_INFO.labels))

    async def settings(self) -> dict[str, Any]:
        """Everything of the schema; {} on an engine without KV transfer."""
        if self._engine is None:
            return {}
        workers = await self._workers()
        first = workers[0] if workers else {}
        why = first.get("why_no_readback")
        on = self._base["bidirectional"] and self._base["connector"] == "pdctl"
        return self._base | {
            "num_blocks": self._engine.vllm_config.cache_config.num_gpu_blocks,
            "readback": bool(on and not why) if workers else None,
            "why_no_readback": why if on else None,
            "provider": first.get("provider"),
            "rails": first.get("rails"),
            "rdma_devices": sorted({name for one in workers for name in one["rdma_devices"]}),
            "workers": workers,
        }

    async def _workers(self) -> list[dict[str, Any]]:
        """What the workers tell; [] from those that do not."""
        try:
            found = await self._engine.collective_rpc(SETTINGS_RPC, timeout=RPC_SECONDS)
        except Exception as error:
            _logger().warning("pd_connector: workers tell no settings: %r", error)
            return []
        return [one for one in found if isinstance(one, dict) and one]


def _logger() -> Any:
    from vllm.logger import init_logger  # noqa: PLC0415

    return init_logger("vllm.pd_connector.settings")


def _checks_params() -> bool:
    from pd_connector import admission  # noqa: PLC0415

    return admission.active


def _label(settings: dict[str, Any], name: str) -> str:
    special = {
        "threshold": settings["recompute_threshold"],
        "policy": settings["load_failure_policy"],
        "backend": ",".join(settings["backends"]),
        "version": settings["versions"]["pdctl"],
        "bidirectional": "on" if settings["bidirectional"] else "off",
    }
    value = special.get(name, settings.get(name))
    return "" if value is None else str(value)
