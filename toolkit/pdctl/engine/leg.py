"""Spec -> one engine. Pure."""

from pathlib import Path

from pdctl.engine.environment import environment, secret
from pdctl.engine.flags import flags
from pdctl.engine.kv_config import kv_config
from pdctl.engine.lookup import model_of, setting, whole_path
from pdctl.legs import Leg
from pdctl.spec.model import Leg as LegSpec
from pdctl.spec.model import Role, Spec


def engine_leg(spec: Spec, base: Path, role: str, index: int, leg: LegSpec, on: bool) -> Leg:
    name = f"{role}-{index}"
    settings: Role = getattr(spec, role)
    ranks = setting(leg, settings, "data_parallel", 1)
    venv = whole_path(spec.engine.venv, base) if spec.engine.venv else None
    model = model_of(spec, base)
    python = whole_path(spec.engine.python, base) if spec.engine.python else "python3"
    if spec.engine.device == "cuda" and not spec.engine.python:
        command: tuple[str, ...] = ("vllm", "serve", model)
    else:
        module = "vllm.entrypoints.openai.api_server"
        command = (python, "-m", module, "--model", model)
    cpus = setting(leg, settings, "cpus", "")
    if cpus:
        command = ("taskset", "-c", cpus, *command)
    return Leg(
        name=name,
        role="prefill" if role == "prefill" else "decode",
        deployment=spec.name,
        host=leg.host,
        bind=leg.listen_host,
        port=leg.port,
        listens=(
            (leg.listen_host, leg.port),
            *((leg.handshake_host, leg.side_channel_port + rank) for rank in range(ranks)),
        ),
        checked=(
            name,
            spec.engine.vllm,
            spec.engine.nixl,
            str(spec.fabric.interfaces or 0),
        ),
        cpus=cpus,
        venv=venv,
        python=python,
        command=command,
        env=(*secret(spec, base), *environment(spec, name, role, settings, leg)),
        flags=tuple(flags(spec, base, role, settings, leg)),
        kv_config=kv_config(spec, role, index, leg, on),
    )
