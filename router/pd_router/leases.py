"""Orders about the turns that decode legs keep: release them, or let them live longer."""

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pd_connector import contract
from pd_router import jsonbytes
from pd_router.engines import Engines, LegFailure
from pd_router.legs import Leg

log = logging.getLogger("pd_router")

MOST_AT_ONCE = 1000
"""Turns of one order."""
PAUSE_SECONDS = 0.2
"""Between two rounds of orders: none is a hurry, and many turns travel in one."""
_POST_SECONDS = 5.0


class LeaseOrders:
    """Sends orders to decode legs. A leg that takes none is left alone until it restarts."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._key = lease_key()
        self._off: set[tuple[str, str]] = set()

    def takes(self, leg: str, engine: str) -> bool:
        """Whether this engine of a leg may take orders."""
        return (leg, engine) not in self._off

    async def send(self, leg: Leg, order: Mapping[str, Any]) -> dict[str, Any] | None:
        """The leg's answer (docs/engine-http.md); None without one."""
        headers = {} if self._key is None else {contract.LEASE_KEY_HEADER: self._key}
        try:
            status, answer = await self._engines.fetch(
                leg,
                contract.ENGINE_LEASES_PATH,
                jsonbytes.dump(order),
                headers,
                total=_POST_SECONDS,
            )
        except LegFailure:
            return None
        if status in (401, 403, 404, 405):
            if status in (401, 403):
                log.warning(
                    "leg %s takes no orders about kept turns (HTTP %d): the router needs the "
                    "same %s",
                    leg.name,
                    status,
                    contract.SECRET_FILE_VARIABLE,
                )
            self._off.add((leg.name, leg.engine or ""))
        try:
            body = jsonbytes.load(answer) if status == 200 else None
        except ValueError:
            return None
        return body if isinstance(body, dict) else None


def lease_key() -> str | None:
    """What opens the leases of this deployment's engines; None without a secret."""
    path = os.environ.get(contract.SECRET_FILE_VARIABLE)
    if not path:
        return None
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        log.warning("%s=%s: %s", contract.SECRET_FILE_VARIABLE, path, error.strerror)
        return None
    return hmac.new(secret, contract.LEASE_KEY_INPUT, hashlib.sha256).hexdigest()
