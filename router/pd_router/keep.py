"""What a finished turn leaves for the next one: decode's handle, held or given back."""

import logging
import os
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from pd_connector import contract
from pd_router.answer import Answer
from pd_router.handles import Handle, can_be_read
from pd_router.history import Prompt
from pd_router.identity import Identity
from pd_router.legs import Leg, base_of
from pd_router.packing import pack
from pd_router.parts import Router
from pd_router.relay import OnComplete
from pd_router.settings import Settings
from pd_router.tokens import IdsTap

log = logging.getLogger("pd_router")


@dataclass(slots=True)
class Keeper:
    """Takes a turn's finished answer."""

    router: Router
    settings: Settings
    identity: Identity
    prompt: Prompt | None
    leg: Leg
    tap: IdsTap | None
    turn: int
    appended: bool
    """Decode did the turn alone: its prefix cache has it, whether or not it keeps the blocks."""
    pending: Awaitable[None] | None = None
    """To be awaited before the turn ends."""

    @property
    def wanted(self) -> OnComplete | None:
        """What to call with the answer; None when nothing can come of it."""
        return self._keep if self.settings.bidirectional or self.appended else None

    def _keep(self, answer: Answer) -> None:
        try:
            handle = self._handle(answer)
        except Exception:
            # The client gets its answer whatever becomes of the handle.
            log.exception("a handle could not be kept")
            return
        if handle is not None:
            self.pending = self.router.handles.put(handle)
            if handle.readable:
                self.router.metrics.handles_stored.inc()

    def _handle(self, answer: Answer) -> Handle | None:
        params = answer.handle if answer.handle and can_be_read(answer.handle) else None
        if params is not None:
            self.router.health.saw_engine(self.leg, params.get(contract.REMOTE_ENGINE_ID))
        handle = None
        reused = self.settings.proof != "off" and self.settings.route != "recompute"
        # A leg that left the list while it answered may be on its way out.
        usable = self.leg.down is None and self.router.legs.named(self.leg.name) is self.leg
        if reused and self.prompt is not None and answer.complete and usable:
            handle = self._made(self.prompt, answer, params)
        if handle is None and params is not None:
            self.router.releases.add_request(self.leg, str(params[contract.REMOTE_REQUEST_ID]))
        return handle

    def _made(self, prompt: Prompt, answer: Answer, params: dict[str, Any] | None) -> Handle | None:
        past = prompt.finished(answer)
        key = self.identity.key(past)
        if key is None or (params is None and not (self.appended and self.leg.prefix_caching)):
            return None
        settings, now = self.settings, time.time()
        known = params or {}
        tokens = known.get(contract.REMOTE_NUM_TOKENS)
        if not isinstance(tokens, int):
            tokens = self.router.chooser.costs.tokens_in(past.size)
        engine = sys.intern(
            base_of(str(known.get(contract.REMOTE_ENGINE_ID) or self.leg.engine or ""))
        )
        left = self.router.deadlines.seconds_left(engine, known, settings.decode_ttl)
        proof = known.get(contract.PD_TOKENS)
        request = str(known.get(contract.REMOTE_REQUEST_ID) or "")
        life = settings.handle_ttl - (settings.decode_ttl - left)
        if request:
            life = self.router.renewals.keep(self.leg.name, engine, request, life)
        return Handle(
            id=os.urandom(8).hex(),
            request=request,
            key=key,
            packed=b"" if params is None else pack(params),
            leg=self.leg.name,
            engine=engine,
            past=past,
            tokens=tokens,
            ids_digest=b"" if self.tap is None else self.tap.digest(tokens),
            proven=isinstance(proof, dict),
            partial=isinstance(proof, dict) and bool(proof.get("d")),
            turn=self.turn,
            born=now,
            expires=now + life,
        )
