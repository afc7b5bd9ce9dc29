"""What became of a handle that prefill was given."""

from typing import Any

from pd_connector.contract import READ_MARGIN_SECONDS, Outcome


def outcome_of(reuse: Any, usage: dict[str, Any], seconds_left: float) -> tuple[Outcome, int]:
    """The outcome and the tokens read back.

    ``reuse`` is the connector's word (``PD_REUSE``); a stock engine gives none, and then
    ``usage`` and ``seconds_left``, the handle's remaining life on decode, have to tell.
    """
    if isinstance(reuse, dict) and reuse.get("outcome") in {o.value for o in Outcome}:
        read = reuse.get("tokens_read")
        return Outcome(reuse["outcome"]), read if isinstance(read, int) else 0
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if isinstance(cached, int) and cached > 0:
        return Outcome.HIT, cached
    return (Outcome.EXPIRED if seconds_left < READ_MARGIN_SECONDS else Outcome.FAILED), 0
