"""Spec -> legs: environment, command line and ports of every process. Pure."""

from pathlib import Path
from typing import Any

from pdctl.engine.environment import secret
from pdctl.engine.leg import engine_leg
from pdctl.engine.lookup import served_name, setting, whole_path
from pdctl.legs import NONCE, Deployment, Flag, Leg, Variable, kv_config_json
from pdctl.spec.model import Role, Spec

__all__ = ["NONCE", "Deployment", "Flag", "Leg", "Variable", "kv_config_json", "plan"]


def plan(spec: Spec, base: Path) -> Deployment:
    """The processes of a spec.

    Args:
        base: folder that relative paths of the spec start from (the spec file's).
    """
    on = spec.kv_transfer.bidirectional
    engines = tuple(
        engine_leg(spec, base, role, index, leg, on)
        for role in ("prefill", "decode")
        for index, leg in enumerate(getattr(spec, role).legs)
    )
    return Deployment(
        spec.name, on, served_name(spec, base), engines, _router(spec, base, engines, on)
    )


def _router(spec: Spec, base: Path, engines: tuple[Leg, ...], on: bool) -> Leg:
    router = spec.router
    python = router.python or spec.engine.python
    venv = whole_path(spec.engine.venv, base) if spec.engine.venv and not python else None
    interpreter = whole_path(python, base) if python else "python3"
    return Leg(
        name="router-0",
        role="router",
        deployment=spec.name,
        host="127.0.0.1"
        if router.host == "0.0.0.0"
        else "::1"
        if router.host == "::"
        else router.host,
        bind=router.host,
        port=router.port,
        listens=((router.host, router.port),),
        checked=(),
        cpus="",
        venv=venv,
        python=interpreter,
        command=(interpreter, "-m", "pd_router"),
        env=tuple(secret(spec, base)),
        flags=(),
        kv_config={},
        config=_router_config(spec, base, engines, on),
        tls=router.tls_certificate is not None,
    )


def _router_config(spec: Spec, base: Path, engines: tuple[Leg, ...], on: bool) -> dict[str, Any]:
    """What pd_router reads; its settings.py describes the keys."""
    router, kv, seen = spec.router, spec.kv_transfer, spec.observability
    limits = router.limits

    def file(path: str | None) -> str | None:
        return None if path is None else whole_path(path, base)

    def legs(role: str) -> dict[str, Any]:
        section: Role = getattr(spec, role)
        own = zip((leg for leg in engines if leg.role == role), section.legs, strict=True)
        return {
            leg.name: {
                "url": leg.url,
                "bidirectional": on,
                "prefix_caching": setting(settings, section, "prefix_caching", role == "decode"),
            }
            for leg, settings in own
        }

    return {
        "name": "router-0",
        "host": router.host,
        "port": router.port,
        "prefill": legs("prefill"),
        "decode": legs("decode"),
        "connector": kv.connector,
        "bidirectional": on,
        "reuse_proof": None if router.reuse_proof == "auto" else router.reuse_proof,
        "handle_ttl": router.handle_ttl,
        "handle_max_age": router.handle_max_age,
        "decode_ttl": kv.decode_ttl,
        "readback_timeout": router.readback_timeout,
        "recompute_threshold": kv.recompute_threshold,
        "block_size": kv.block_size,
        "conversation_headers": router.conversation_headers,
        "tenant_header": router.tenant_header,
        "route": router.route,
        "append_max_tokens": router.append_max_tokens,
        "max_decode_stall_ms": router.max_decode_stall_ms,
        "rates": router.rates.model_dump(),
        "max_handles": router.max_handles,
        "deployment": spec.name,
        "state": router.state,
        "native": router.native,
        "api_keys_file": file(router.api_keys_file),
        "admin_token_file": file(router.admin_token_file),
        "tls": {"certificate": file(router.tls_certificate), "key": file(router.tls_key)}
        if router.tls_certificate
        else None,
        "drain_timeout": router.drain_timeout,
        "max_body_bytes": limits.max_body,
        "max_header_bytes": limits.max_header,
        "max_requests": limits.max_requests,
        "body_timeout": limits.body_timeout,
        "client_stall_timeout": limits.client_stall_timeout,
        "otlp_endpoint": seen.otlp_endpoint,
        "otlp_protocol": seen.otlp_protocol,
        "trace_conversation_ids": seen.conversation_ids,
    }
