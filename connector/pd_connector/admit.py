"""What the scheduler takes of ``kv_transfer_params``: only well-formed, signed, unused handles.

The API server refuses most of it before (:mod:`pd_connector.admission`); here nothing is
answered with an error and nothing ends the engine.
"""

import time
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger

from pd_connector.contract import (
    DO_REMOTE_DECODE,
    DO_REMOTE_PREFILL,
    PD_SIGNATURE,
    REMOTE_BLOCK_IDS,
)
from pd_connector.counters import Pending
from pd_connector.params import ParamsError, check_params
from pd_connector.seams import BLOCKS_PROCESSED
from pd_connector.signature import Signer, UsedHandles
from pd_connector.telemetry import ENGINE_REFUSED

logger = init_logger("vllm.pd_connector.admit")

LEAST_MEMORY_SECONDS = 3600.0
"""How long at least a used handle is remembered."""


class Gate:
    """Admits the handles that arrive at one engine core, and signs those that leave it."""

    def __init__(
        self,
        secret: bytes | None,
        known: frozenset[str] | None,
        decode_ttl: float,
        pending: Pending,
    ) -> None:
        self._signer = Signer(secret) if secret else None
        self._known = known
        self._pending = pending
        self._used = UsedHandles(max(LEAST_MEMORY_SECONDS, 2 * decode_ttl))

    @property
    def signs(self) -> bool:
        """Whether handles are signed here, and unsigned ones refused."""
        return self._signer is not None

    def admit(self, request: Any) -> str:
        """Take from a request what must not be acted on: it is answered without it.

        Returns why its handle was not taken, nothing if it was or there is none.
        """
        params = request.kv_transfer_params
        if not params:
            return ""
        try:
            check_params(params, self._known)
        except ParamsError as error:
            request.kv_transfer_params = None
            return self.refused(request, "malformed", str(error))
        if self._signer is None or not params.get(REMOTE_BLOCK_IDS):
            return ""
        refusal = self._signer.refusal(params)
        return self.disarm(request, refusal) if refusal else ""

    def disarm(self, request: Any, reason: str) -> str:
        """Forget the handle of a request. Nobody is told: it may name another's blocks."""
        prefills = bool(request.kv_transfer_params.get(DO_REMOTE_DECODE))
        request.kv_transfer_params = {
            DO_REMOTE_PREFILL: False,
            DO_REMOTE_DECODE: prefills,
            BLOCKS_PROCESSED: True,
        }
        return self.refused(request, reason, "its handle is not taken")

    def refused(self, request: Any, reason: str, text: str) -> str:
        """Count and log it."""
        self._pending.add(ENGINE_REFUSED, reason)
        logger.warning("pd_connector: request %s: %s (%s)", request.request_id, text, reason)
        return reason

    def was_used(self, handle: Mapping[str, Any]) -> bool:
        """Whether this leg has read the handle, or has told its maker that it will not."""
        return handle in self._used

    def use(self, handle: Mapping[str, Any]) -> None:
        """The handle is about to be read."""
        self._used.add(handle, time.monotonic())

    def sign(self, handle: dict[str, Any]) -> None:
        """The last thing that is done to a handle before it leaves."""
        if self._signer is not None:
            handle[PD_SIGNATURE] = self._signer.sign(handle)
