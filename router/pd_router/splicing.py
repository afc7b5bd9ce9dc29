"""The plain middle of streams, passed on by a thread of its own outside the interpreter.

A stream's first and last events, whatever holds a handle, an error or counts, and clients that
read slowly are for :mod:`pd_router.pipe`; between those nothing needs Python, and with this
nothing waits for it. Needs the native part (``_splice.c``), which an installation without a
compiler lacks.
"""

import asyncio
import errno
import logging
import math
import resource
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

try:
    from pd_router import _splice
except ImportError:
    _splice = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pd_router._splice import Report

log = logging.getLogger("pd_router")

REPORT_BYTES = 16 << 10
"""Events that have been passed on are told of this many bytes at a time, for the history guard."""

_SHARE = 4
"""Every how many-th file descriptor may be for splices, which need two more a stream: what
needs none of them must not be refused for their sake."""

OnReport = Callable[["Report"], None]


class Splice:
    """One stream that is being passed on."""

    def __init__(self, splices: "Splices", id: int) -> None:
        self._splices = splices
        self._id = id

    def stop(self) -> "Report | None":
        """Pass on nothing more. What was left to be told; None if all has been."""
        return self._splices.stop(self._id)

    def silence(self) -> float:
        """Seconds since the engine sent anything."""
        return self._splices.silence(self._id)


class Splices:
    """All of one event loop, and their thread."""

    def __init__(self) -> None:
        """Raises :class:`OSError` when there can be no thread."""
        self._splicer = _splice.Splicer(REPORT_BYTES)
        self._on_report: dict[int, OnReport] = {}
        self._due: deque[Report] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._splicer.fileno(), self._take)

    @property
    def count(self) -> int:
        return len(self._on_report)

    def begin(
        self, source: int, target: int, marks: tuple[bytes, ...], keep: bool, on_report: OnReport
    ) -> Splice:
        """Pass on from a socket that is at the start of a chunk to another, neither encrypted.

        ``on_report`` is called with what ``keep`` asks for and, once, when a chunk with one of
        ``marks`` or anything else out of the ordinary has ended it. Raises :class:`OSError`.
        """
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 2 * (self.count + 1) * _SHARE > most:
            raise OSError(errno.EMFILE, "too few file descriptors")
        id = self._splicer.add(source, target, marks, keep)
        self._on_report[id] = on_report
        return Splice(self, id)

    def stop(self, id: int) -> "Report | None":
        self._on_report.pop(id, None)
        due = [report for report in self._due if report[0] == id]
        for report in due:
            self._due.remove(report)
        return self._splicer.stop(id) or (due[-1] if due else None)

    def silence(self, id: int) -> float:
        # What has been told and not been taken back is heard of no more.
        return self._splicer.silence(id) if id in self._on_report else math.inf

    def close(self) -> None:
        self._loop.remove_reader(self._splicer.fileno())
        self._splicer.close()

    def _take(self) -> None:
        # What is not taken yet is bounded, each stream's by itself; what is due is not.
        if not self._due:
            self._due += self._splicer.take()
            self._tell_one()

    def _tell_one(self) -> None:
        """One at a time: many streams end in the same moment, and what comes in meanwhile, first
        requests among it, shall not wait for all of them."""
        if not self._due:
            return
        report = self._due.popleft()
        if self._due:
            self._loop.call_soon(self._tell_one)
        id, reason = report[:2]
        on_report = self._on_report.get(id) if not reason else self._on_report.pop(id, None)
        if on_report is not None:
            on_report(report)


def client_has_gone(report: "Report") -> bool:
    """The splice is over because nothing more can be sent."""
    return report[1] == _splice.CLIENT_GONE


def open_splices(wanted: bool) -> Splices | None:
    """None where streams are passed on in Python."""
    if not wanted:
        return None
    if _splice is None:
        log.info("without its native part (no compiler at installation): streams cost more")
        return None
    try:
        return Splices()
    except OSError as error:
        log.warning("without its native part (%s): streams cost more", error)
        return None
