"""A spec's deployment on this machine, as a place to measure."""

from pathlib import Path
from typing import Any

from pdctl.bench.places import DeploymentPlace
from pdctl.cli.progress import Progress
from pdctl.errors import PdctlError
from pdctl.launch.state import DeploymentState
from pdctl.launch.up import bring_up, leg_statuses, take_down
from pdctl.plan import Deployment
from pdctl.spec import Loaded


def about_spec(loaded: Loaded | None) -> dict[str, Any]:
    """What the evidence and the report need of the spec."""
    if loaded is None:
        return {}
    spec = loaded.spec
    return {
        "about": {
            "model": spec.model.served_name or spec.model.id,
            "dtype": spec.model.dtype,
            "device": spec.engine.device,
            "vllm": spec.engine.vllm,
            "nixl": spec.engine.nixl,
            "connector": spec.kv_transfer.connector,
            "backend": spec.kv_transfer.backend,
            "block_size": spec.kv_transfer.block_size,
            "recompute_threshold": spec.kv_transfer.recompute_threshold,
            "decode_ttl_s": spec.kv_transfer.decode_ttl,
            "prefill_prefix_caching": bool(spec.prefill.prefix_caching),
            "legs": {"prefill": len(spec.prefill.legs), "decode": len(spec.decode.legs)},
        }
    }


def deployment_place(
    loaded: Loaded, base: Path, timeout: float, progress: Progress, attach: bool, keep: bool
) -> DeploymentPlace:
    """The spec's deployment on this machine.

    Raises:
        PdctlError: it runs already, or, to attach to, does not (exit code 2).
    """
    name = loaded.spec.name
    state = DeploymentState(name)
    runs = any(status.pid for status in leg_statuses(state))
    if runs and not attach:
        raise PdctlError(
            f"{name} is up already: run 'pdctl down {name}' first, or --attach to use it", 2
        )
    if attach and not runs:
        raise PdctlError(f"{name} is not up: run 'pdctl up' first, or leave --attach out", 2)

    def up(deployment: Deployment) -> None:
        bring_up(deployment, timeout, progress.say, progress.watch)

    def down() -> None:
        take_down(state, None, progress.say)

    def leg_log(leg: str) -> str:
        try:
            return state.log(leg).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    stays = attach or keep
    return DeploymentPlace(loaded.spec, base, up, leg_log, None if stays else down, attach)
