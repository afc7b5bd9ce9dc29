"""Live progress of a start: one line per leg on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdctl.launch.up import LegStatus

_PLAIN_EVERY_SECONDS = 10.0


class Progress:
    """Context manager; ``say`` and ``watch`` are what :func:`pdctl.launch.up.bring_up` calls."""

    def __init__(self, stream: TextIO):
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._phases: dict[str, str] = {}
        self._next_plain = 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_live()

    def say(self, line: str) -> None:
        """Print one line for good."""
        self._stop_live()
        self._console.print(Text(line))

    def watch(self, statuses: list[LegStatus], waited: float) -> None:
        """Show what the legs are doing now."""
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, transient=True, refresh_per_second=4)
                self._live.start()
            self._live.update(_table(statuses, waited))
            return
        now = time.monotonic()
        for status in statuses:
            name, phase = status.record.name, status.phase.value
            if self._phases.get(name) != phase or now >= self._next_plain:
                detail = "" if phase == "healthy" else f": {status.last_line}"
                if not (phase == "healthy" and self._phases.get(name) == phase):
                    self._console.print(Text(f"{name}: {phase} after {waited:.0f} s{detail[:160]}"))
            self._phases[name] = phase
        if now >= self._next_plain:
            self._next_plain = now + _PLAIN_EVERY_SECONDS

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _table(statuses: list[LegStatus], waited: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for status in statuses:
        line = Text(status.last_line, style="dim", no_wrap=True, overflow="ellipsis")
        table.add_row(status.record.name, status.phase.value, f"{waited:.0f} s", line)
    return table
