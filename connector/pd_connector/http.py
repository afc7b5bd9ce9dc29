"""The vLLM endpoint plugin: HTTP routes that pd_connector adds to an engine's API server.

vLLM loads endpoint plugins only when VLLM_PLUGINS names them.
"""

from typing import Any

from pd_connector.contract import PLUGIN_NAME
from pd_connector.endpoint import add_lease_routes
from pd_connector.settings_endpoint import SettingsEndpoint


class EngineRoutes:
    """What the entry point of ``vllm.endpoint_plugins`` makes."""

    name = PLUGIN_NAME
    required_tasks = None

    def __init__(self) -> None:
        self._vllm_config: Any = None
        self._settings = SettingsEndpoint()

    def attach_router(self, app: Any) -> None:
        add_lease_routes(app, lambda: self._vllm_config)
        self._settings.add_route(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._vllm_config = getattr(engine_client, "vllm_config", None)
        await self._settings.start(engine_client)
