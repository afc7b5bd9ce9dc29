"""What runs, how much of it may, and how it ends when the router does."""

import asyncio

from pd_router.errors import unavailable
from pd_router.pipe import open_pipes

_CUT_SECONDS = 5.0
"""For the last bytes of what was cut off."""


class Drain:
    """The requests in flight, and the end of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._none = asyncio.Event()
        self.begun = False
        """No new requests are taken."""
        self.over = False
        """What still runs is being cut off."""

    def __enter__(self) -> None:
        """The current task answers a request, for as long as this context lasts."""
        task = asyncio.current_task()
        assert task is not None
        if not self._tasks:
            self._none.clear()
        self._tasks.add(task)

    def __exit__(self, *error: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)
        if not self._tasks:
            self._none.set()

    def check(self, most: int) -> None:
        """Raises a 503 if the router stops, or if more than ``most`` requests are in flight."""
        if self.begun:
            raise unavailable("The router shuts down.")
        if len(self._tasks) > most:
            raise unavailable("Too many requests are in flight.")

    def begin(self) -> None:
        self.begun = True
        if not self._tasks:
            self._none.set()

    async def finish(self, within: float) -> int:
        """Wait for what runs, then end it: streams with an error event, the rest with a 503.

        Returns how many had to be cut off.
        """
        if await self._ended(within):
            return 0
        self.over = True
        cut = len(self._tasks)
        streams = set()
        for pipe in open_pipes():
            pipe.interrupt("the router shuts down")
            streams.add(pipe.task)
        for task in self._tasks - streams:
            task.cancel()
        # A stream says so to its client; one whose client does not listen is dropped.
        if not await self._ended(_CUT_SECONDS):
            for task in list(self._tasks):
                task.cancel()
        return cut

    async def _ended(self, within: float) -> bool:
        try:
            await asyncio.wait_for(self._none.wait(), within)
        except asyncio.TimeoutError:
            return False
        return True
