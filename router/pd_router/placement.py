"""Where a turn's prompt goes: the route, and the prefill leg if it needs one."""

import msgspec

from pd_connector.contract import Route
from pd_router.claims import Found
from pd_router.errors import TurnError
from pd_router.history import Prompt
from pd_router.legs import Leg
from pd_router.parts import Router
from pd_router.routes import Choice, Question


class Placement(msgspec.Struct, frozen=True):
    """``prefill`` is None where no prefill leg is up."""

    choice: Choice
    prefill: Leg | None


def place(
    router: Router, found: Found, prompt: Prompt | None, decode: Leg, pinned: Route | None
) -> Placement:
    """The route of a prompt whose answer ``decode`` gives.

    A handle that no prefill leg can use now gets its reason into ``found``.

    Raises:
        TurnError: it needs a prefill leg and none is up.
    """
    holder = decode.name if found.handle is None else found.handle.leg

    def reads(leg: Leg) -> bool:
        return leg.bidirectional and router.pairs.up(leg.name, holder)

    def works(leg: Leg) -> bool:
        return router.pairs.up(leg.name, decode.name) and (not found.readable or reads(leg))

    try:
        prefill = router.legs.pick_prefill(good=works)
    except TurnError:
        prefill = None
    if found.readable and prefill is not None and not reads(prefill):
        found.reason = "pair_down" if prefill.bidirectional else "not_bidirectional"
    choice = router.chooser.choose(
        Question(
            prompt_tokens=_estimate(router, found, prompt),
            shared=found.shared(),
            readable=found.readable,
            unreadable_because=found.reason,
            cached=found.shared() if holder == decode.name else 0,
            prefill=prefill,
            decode=decode,
        ),
        pinned,
    )
    if choice is None:
        prefill = router.legs.pick_prefill()  # Says why there is none.
        choice = Choice(Route.RECOMPUTE, "no_prefill_leg", 0)
    return Placement(choice, prefill)


def _estimate(router: Router, found: Found, prompt: Prompt | None) -> int:
    """Tokens of the prompt; those of its history are known where it continues a handle."""
    size, costs, handle = 0 if prompt is None else prompt.size, router.chooser.costs, found.handle
    if handle is None or not found.continues:
        return costs.tokens_in(size)
    per_item = handle.tokens / max(handle.past.size, 1)
    return handle.tokens + int(max(size - handle.past.size, 0) * per_item) + 1
