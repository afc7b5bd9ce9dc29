"""What became of a prompt and of the handle that it came with, from the engine's answer."""

from typing import Any

import msgspec

from pd_connector import contract
from pd_connector.contract import READ_MARGIN_SECONDS, Outcome

_OUTCOMES = {outcome.value for outcome in Outcome}


class Reuse(msgspec.Struct, frozen=True, gc=False):
    """Tokens are counts, None where the engine does not tell."""

    outcome: Outcome
    reason: str = ""
    prompt_tokens: int | None = None
    read: int = 0
    cached: int | None = None
    """Of the prompt, from anywhere."""
    read_ms: float | None = None
    read_bytes: int | None = None

    @property
    def computed(self) -> int | None:
        if self.prompt_tokens is None or self.cached is None:
            return None
        return max(self.prompt_tokens - self.cached, 0)


def readback_of(reuse: Any, usage: dict[str, Any], seconds_left: float) -> Reuse:
    """Of a prefill that was given a handle.

    ``reuse`` is the connector's word (``PD_REUSE``); a stock engine gives none, and then
    ``usage`` and ``seconds_left``, the handle's remaining life on decode, have to tell.
    """
    prompt, cached = _prompt_tokens(usage), cached_tokens(usage)
    if isinstance(reuse, dict) and reuse.get("outcome") in _OUTCOMES:
        read = _number(reuse.get("tokens_read"), int) or 0
        reason = reuse.get("reason")
        return Reuse(
            Outcome(reuse["outcome"]),
            reason if isinstance(reason, str) and reason.isidentifier() else "",
            prompt,
            read,
            read if cached is None else cached,
            _number(reuse.get("read_ms"), float),
            _number(reuse.get("read_bytes"), int),
        )
    if cached:
        return Reuse(Outcome.HIT, "", prompt, cached, cached)
    late = seconds_left < READ_MARGIN_SECONDS
    return Reuse(Outcome.EXPIRED if late else Outcome.FAILED, "", prompt, 0, cached)


def recompute_of(outcome: Outcome, reason: str, usage: dict[str, Any]) -> Reuse:
    """Of a prefill without a handle."""
    cached = cached_tokens(usage)
    if cached and outcome is Outcome.MISS:
        outcome = Outcome.LOCAL_HIT
    return Reuse(outcome, reason, _prompt_tokens(usage), 0, cached or 0)


def append_of(usage: dict[str, Any]) -> Reuse:
    """Of a prompt that decode did alone."""
    cached = cached_tokens(usage) or 0
    outcome = Outcome.LOCAL_HIT if cached else Outcome.MISS
    return Reuse(outcome, "", _prompt_tokens(usage), 0, cached)


def pd_reuse(params: dict[str, Any] | None) -> Any:
    """The connector's word, taken out of prefill's answer to the prompt."""
    return params.pop(contract.PD_REUSE, None) if params else None


def cached_tokens(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) and cached >= 0 else None


def _prompt_tokens(usage: dict[str, Any]) -> int | None:
    tokens = usage.get("prompt_tokens")
    return tokens if isinstance(tokens, int) and tokens >= 0 else None


def _number(value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return kind(value)
