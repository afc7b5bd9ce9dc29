"""One prompt's way through the prefill leg."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pd_connector.contract import Outcome
from pd_connector.readback import Decision
from pd_connector.reads import Reading


@dataclass
class Prompt:
    """What the scheduler knows of a prompt until its request is finished."""

    request: Any
    decision: Decision | None = None
    proven: int | None = None
    """Tokens of the handle that are proven to be the prompt's, once they were compared."""
    ids: Sequence[int] | None = None
    """The prompt's token ids, packed, once they were compared."""
    local_tokens: int = 0
    """Tokens in the leg's own prefix cache when the readback was decided."""
    settled: bool = False
    """Blocks were allocated on the decision: it is not taken again."""
    reading: int = 0
    """Tokens being read."""
    tokens_read: int = 0
    arrived: int = field(default_factory=time.time_ns)
    offered: int = 0
    """Tokens that the handle holds."""
    refusal: str = ""
    """Why decode did not let the handle be read, or why it was not taken."""
    read: Reading | None = None
    expired: bool = False
    outcome: Outcome = Outcome.MISS

    def account(self) -> None:
        """Its read ended. vLLM's scheduler has already taken back what failed to load."""
        loaded = self.request.num_computed_tokens - self.local_tokens
        self.tokens_read = max(0, min(self.reading, loaded))
        if self.tokens_read < self.reading:
            self.outcome = Outcome.EXPIRED if self.expired else Outcome.FAILED
            self._correct_counters()

    def _correct_counters(self) -> None:
        """Take back from vLLM's prompt token counters what never came.

        vLLM counts a prompt's tokens by source when it asks for the read and counts them
        again only if nothing of the prompt is left.
        """
        stats = getattr(self.request, "prefill_stats", None)
        if stats is not None:
            stats.set(
                num_prompt_tokens=self.request.num_prompt_tokens,
                num_local_cached_tokens=self.local_tokens,
                num_external_cached_tokens=self.tokens_read,
            )
