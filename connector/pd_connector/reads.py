"""READs inside the scheduler: claimed before they start, measured and told when they end."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pd_connector.claims import Claims, PendingClaim
from pd_connector.contract import (
    DO_REMOTE_PREFILL,
    PD_LEASE,
    REMOTE_ENGINE_ID,
    REMOTE_HOST,
    REMOTE_PORT,
    REMOTE_REQUEST_ID,
)
from pd_connector.counters import Pending
from pd_connector.leases import Claim
from pd_connector.telemetry import (
    BACKEND,
    BYTES,
    DESCRIPTOR_COUNT,
    DIRECTION,
    ENGINE_TRANSFER_BYTES,
    ENGINE_TRANSFER_DESCRIPTORS,
    ENGINE_TRANSFER_FAILURES,
    ENGINE_TRANSFER_POST,
    ENGINE_TRANSFER_SECONDS,
    PEER,
    POST_MS,
    SPAN_TRANSFER,
)
from pd_connector.tracing import Spans
from pd_connector.transfers import Transfer, peer_name

READBACK, PUSHED_ON = "d2p", "p2d"
_LATE = 1.0
"""A READ must end this many seconds before its claim does."""


def _grows_old(pending: PendingClaim, claim: Claim) -> bool:
    return claim.granted and time.perf_counter() - pending.asked > claim.seconds / 2


@dataclass
class Reading:
    """A request whose blocks are read from a peer."""

    direction: str
    peer: str
    trace_headers: Any
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0


class Reads:
    """The READs of one engine's requests."""

    def __init__(self, claims: Claims, pending: Pending, spans: Spans, backend: str) -> None:
        self._claims = claims
        self._pending = pending
        self._spans = spans
        self._backend = backend
        self._asked: dict[str, tuple[PendingClaim, Claim | None]] = {}
        self._reading: dict[str, Reading] = {}
        self._seconds: dict[str, float] = {}
        self._ways: set[tuple[str, str, str]] = set()

    def claim(self, request: Any) -> Claim | None:
        """Whether the handle of a request may be read now; None while decode has not answered."""
        handle = request.kv_transfer_params
        if not isinstance(handle.get(PD_LEASE), dict):
            # Decode does not know claims: its deadline in the handle is all there is.
            return Claim(True, float("inf"), "granted")
        pending, claim = self._asked.get(request.request_id, (None, None))
        if pending is not None and claim is not None and _grows_old(pending, claim):
            # It has waited for blocks of its own meanwhile.
            pending = claim = None
        if pending is None:
            pending = self._claims.start(
                str(handle[REMOTE_HOST]),
                int(handle[REMOTE_PORT]),
                str(handle[REMOTE_REQUEST_ID]),
                request.request_id,
            )
        if claim is None:
            claim = self._claims.result(pending)
        self._asked[request.request_id] = (pending, claim)
        return claim

    def start(self, request: Any) -> None:
        """The request's blocks are about to be read."""
        handle = request.kv_transfer_params
        direction = PUSHED_ON if handle.get(DO_REMOTE_PREFILL) else READBACK
        peer = peer_name(handle.get(REMOTE_ENGINE_ID))
        headers = getattr(request, "trace_headers", None)
        self._reading[request.request_id] = Reading(direction, peer, headers)
        if (way := (direction, self._backend, peer)) not in self._ways:
            # At 0 before its first failure, which a rate would not see otherwise.
            self._ways.add(way)
            self._pending.add(ENGINE_TRANSFER_FAILURES, *way, amount=0)
        pending, claim = self._asked.pop(request.request_id, (None, None))
        if pending is not None and claim is not None and claim.granted:
            # Its blocks stay as long as decode said; the handle's own deadline may have moved.
            handle["remote_blocks_expiry_time"] = None
            self._seconds[request.request_id] = (
                claim.seconds - _LATE - (time.perf_counter() - pending.asked)
            )

    def drop(self, request_id: str) -> None:
        """The request will not be read, though it may have been claimed."""
        pending, _ = self._asked.pop(request_id, (None, None))
        if pending is not None:
            self._claims.give_back(pending)

    def forget_claim(self, request_id: str) -> None:
        """The request is settled; where it was claimed for nothing, decode is told so already."""
        self._asked.pop(request_id, None)

    def take_seconds(self) -> dict[str, float]:
        """How long the READs may take that start with the step that is being built."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def ended(self, transfers: Iterable[Transfer]) -> None:
        """Count the transfers that have ended, and tell them."""
        for transfer in transfers:
            reading = self._reading.get(transfer.request_id)
            if reading is None:
                reading = Reading("unknown", "unknown", None)
            labels = (reading.direction, self._backend, reading.peer)
            if transfer.failed:
                reading.failures += 1
                self._pending.add(ENGINE_TRANSFER_FAILURES, *labels)
                continue
            reading.bytes += transfer.bytes
            reading.seconds = max(reading.seconds, transfer.seconds)
            for metric, amount in (
                (ENGINE_TRANSFER_SECONDS, transfer.seconds),
                (ENGINE_TRANSFER_POST, transfer.post_seconds),
                (ENGINE_TRANSFER_BYTES, transfer.bytes),
                (ENGINE_TRANSFER_DESCRIPTORS, transfer.descriptors),
            ):
                self._pending.add(metric, *labels, amount=amount)
            if reading.trace_headers:
                self._spans.add(
                    SPAN_TRANSFER,
                    reading.trace_headers,
                    transfer.started,
                    transfer.started + int(transfer.seconds * 1e9),
                    {
                        DIRECTION: reading.direction,
                        BYTES: transfer.bytes,
                        DESCRIPTOR_COUNT: transfer.descriptors,
                        POST_MS: transfer.post_seconds * 1e3,
                        BACKEND: self._backend,
                        PEER: reading.peer,
                    },
                )

    def over(self, request_id: str) -> Reading | None:
        """All transfers of a request have ended; what was read."""
        return self._reading.pop(request_id, None)

    def close(self) -> None:
        """Let go of threads."""
        self._claims.close()
        self._spans.close()
