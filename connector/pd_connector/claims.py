"""Prefill's side of a lease: asks decode whether a turn may be read, beside the engine's loop."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass

from pd_connector.leases import Claim

ANSWER_SECONDS = 2.0
"""Longest wait for decode's answer; afterwards the prompt is recomputed."""
BRIEF_SECONDS = 0.002
"""The engine's loop waits so long for an answer before it goes on with other work: on one
network an answer takes a fraction of it, and the prompt is read one step earlier."""
_DOWN_SECONDS = 5.0
_THREADS = 8

Ask = Callable[[str, int, str, str], Claim]
"""Ask (host, port, turn, reader); raises OSError when there is no answer."""


@dataclass
class PendingClaim:
    """A claim that was asked for."""

    address: tuple[str, int]
    turn: str
    reader: str
    asked: float
    answer: "Future[Claim]"
    waited: bool = False
    """The loop has waited for it once, and does not do so again."""


class Claims:
    """Claims turns on decode legs without ever blocking a prompt for long."""

    def __init__(
        self,
        ask: Ask,
        give_back: Callable[[str, int, str, str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ask = ask
        self._give_back = give_back
        self._clock = clock
        self._pool: ThreadPoolExecutor | None = None
        self._down: dict[tuple[str, int], float] = {}

    def start(self, host: str, port: int, turn: str, reader: str) -> PendingClaim:
        """Ask decode in the background."""
        now = self._clock()
        answer: Future[Claim]
        if self._down.get((host, port), 0.0) > now:
            answer = Future()
            answer.set_exception(OSError("no answer a moment ago"))
        else:
            answer = self._threads().submit(self._ask, host, port, turn, reader)
        return PendingClaim((host, port), turn, reader, now, answer)

    def result(self, pending: PendingClaim) -> Claim | None:
        """Decode's answer, None while it is still expected."""
        wait, pending.waited = (0.0 if pending.waited else BRIEF_SECONDS), True
        try:
            return pending.answer.result(wait)
        except NotYet:
            if not pending.answer.done() and self._clock() - pending.asked < ANSWER_SECONDS:
                return None
            error = "no answer in time"
            self.give_back(pending)
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        self._down[pending.address] = self._clock() + _DOWN_SECONDS
        return Claim(False, 0.0, f"unreachable: {error}")

    def give_back(self, pending: PendingClaim) -> None:
        """The turn will not be read after all; told to decode in the background."""
        self._threads().submit(self._give_back_quietly, pending)

    def close(self) -> None:
        """Let go of the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _give_back_quietly(self, pending: PendingClaim) -> None:
        try:
            if pending.answer.result(ANSWER_SECONDS).granted:
                self._give_back(*pending.address, pending.turn, pending.reader)
        except Exception:
            return  # The claim lapses by itself.

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pd-claims")
        return self._pool
