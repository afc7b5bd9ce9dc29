"""A new config file for a running router, without dropping a stream."""

import logging
from pathlib import Path

import msgspec

from pd_router.access import Access
from pd_router.parts import Router
from pd_router.settings import SettingsError, load

log = logging.getLogger("pd_router")

NEEDS_RESTART = frozenset(
    """
    name host port tls native state state_timeout deployment
    max_body_bytes max_handles max_handle_bytes max_branches
    max_header_bytes max_headers keep_alive_timeout otlp_endpoint otlp_protocol
    handle_ttl connector bidirectional rates route append_max_tokens max_decode_stall_ms
    native
    """.split()
)
"""Settings that are looked at when the router starts and not again."""


async def reload(router: Router, access: list[Access], config: Path) -> None:
    """Read ``config`` and the files it names again. One that cannot be used changes nothing."""
    try:
        wanted = load(config)
        new_access = Access(wanted)
    except SettingsError as error:
        log.error("not reloaded: %s", error)
        return
    old = router.settings
    kept = {name: getattr(old, name) for name in NEEDS_RESTART}
    settings = msgspec.structs.replace(wanted, **kept)
    access[0] = new_access
    router.settings = settings
    gone = router.legs.update(settings.prefill, settings.decode)
    for leg in gone:
        router.engines.forget(leg)
        if leg.role == "decode":
            await router.handles.drop_leg(leg.name, "released")
    logging.getLogger().setLevel(settings.log_level.upper())
    late = sorted(name for name in NEEDS_RESTART if getattr(wanted, name) != kept[name])
    log.info(
        "reloaded: %s%s",
        ", ".join(leg.name for leg in router.legs),
        f"; needs a restart: {', '.join(late)}" if late else "",
    )
