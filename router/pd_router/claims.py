"""The handle for a turn: found, proven to fit its prompt, claimed."""

from dataclasses import dataclass
from typing import Any, Literal

from pd_connector.contract import Outcome
from pd_router.handles import Handle, HandleStore
from pd_router.history import NO_MATCH, Continuation, Endpoint, Match, Prompt
from pd_router.identity import Identity
from pd_router.legs import Leg
from pd_router.reasons import NoHandle, Refusal
from pd_router.settings import Settings
from pd_router.tokens import PromptIds

MOST_LOST = 0.5
"""Share of a handle's tokens that may be given up to use the rest. A request beside the
conversation, such as one for its title, shares the instructions at best; it is not worth
the handle that the next turn will want."""


@dataclass(slots=True)
class Found:
    """What the store has for a prompt."""

    outcome: Outcome
    """Of the turn, as long as nothing is read."""
    reason: Refusal | NoHandle | Literal[""]
    """Why no handle can be sent; empty: ``handle`` can."""
    handle: Handle | None = None
    """That fits best; not claimed yet."""
    match: Match = NO_MATCH
    near: Handle | None = None
    """The conversation's newest handle, usable or not: its leg is where the history was."""

    @property
    def readable(self) -> bool:
        return self.handle is not None and not self.reason

    @property
    def continues(self) -> bool:
        """The prompt continues the handle's turn, which nothing but it will want any more."""
        return self.match.continuation is not Continuation.CHANGED

    def shared(self) -> int:
        """Tokens of the handle that the prompt starts with, estimated."""
        return 0 if self.handle is None else int(self.handle.tokens * self.match.shared)


NOTHING = Found(Outcome.MISS, "no_handle")


async def find(store: HandleStore, identity: Identity, prompt: Prompt, settings: Settings) -> Found:
    """The best of the conversation's handles for a prompt."""
    handles = await store.find(identity.keys(prompt))
    if not handles:
        return Found(Outcome.MISS, "no_handle")
    live = [handle for handle in handles if handle.live()]
    if not live:
        return Found(Outcome.EXPIRED, "expired", near=handles[0])
    matches = [(handle, prompt.match(handle.past)) for handle in live]
    handle, match = max(matches, key=_worth)
    reason = _why_not(handle, match, settings)
    outcome = Outcome.HISTORY_CHANGED if reason == "history_changed" else Outcome.MISS
    if reason == "unproven":
        outcome = Outcome.HISTORY_CHANGED
    return Found(outcome, reason, handle, match, near=handle)


def _worth(fit: tuple[Handle, Match]) -> tuple[bool, bool, float, float]:
    """What makes one handle fit better than another: it is continued, it can be read, it brings
    more tokens, it is newer."""
    handle, match = fit
    continued = match.continuation is not Continuation.CHANGED
    return continued, handle.readable, handle.tokens * match.shared, handle.born


def _why_not(handle: Handle, match: Match, settings: Settings) -> Refusal | Literal[""]:
    """Why a handle may not be sent with the prompt that it was matched with; empty: it may."""
    proof = settings.proof
    if not handle.readable:
        return "not_readable"
    if match.continuation is Continuation.CHANGED:
        kept = handle.tokens * match.shared
        part = proof == "connector" and handle.partial and match.shared >= MOST_LOST
        useful = kept >= max(settings.recompute_threshold, settings.block_size or 1)
        return "" if part and useful else "history_changed"
    if proof == "connector":
        # From a decode leg without the connector: messages alone would have to be trusted.
        return "" if handle.proven else "unproven"
    if proof == "tokens":
        return "" if handle.ids_digest else "unproven"
    return "" if match.continuation is Continuation.BY_MESSAGES else "unproven"


async def prove(
    found: Found,
    prompt: Prompt,
    ids: PromptIds,
    leg: Leg,
    endpoint: Endpoint,
    fields: dict[str, Any],
) -> None:
    """Compare token ids, where that is the router's to do; what is not proven is not sent."""
    handle = found.handle
    if handle is None or not found.readable:
        return
    digest = None
    if prompt.only_text:
        digest = await ids.digest(leg, endpoint, fields, handle.tokens)
    if digest != handle.ids_digest:
        found.outcome, found.reason = Outcome.HISTORY_CHANGED, "tokens_differ"


async def claim(store: HandleStore, found: Found) -> Handle | None:
    """Claim what was found; None if another turn was faster."""
    handle = found.handle
    if handle is None:
        return None
    if not await store.claim(handle):
        found.outcome, found.reason = Outcome.MISS, "taken"
        return None
    return handle
