"""Reading logs once for all patterns: gigabytes of them, in one pass and flat memory.

All literal texts of all patterns are searched at once (Aho-Corasick); only a line that holds one
of them becomes text and is matched.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import ahocorasick_rs
from ahocorasick_rs import Implementation

from pdctl.doctor.evidence.facts import KEPT_HITS, KEPT_VALUES, Hit, Hits
from pdctl.doctor.evidence.text import printable
from pdctl.doctor.model import Pattern

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 16
"""Of a longer line only the part around a literal text is matched."""
SHOWN_CHARACTERS = 2000


class Stream(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class Scanner:
    """Searches logs for patterns. One scanner serves any number of logs."""

    def __init__(self, patterns: Iterable[Pattern]):
        unique = {pattern.name: pattern for pattern in patterns}
        self._patterns = list(unique.values())
        self._regexes = [re.compile(pattern.regex or "") for pattern in self._patterns]
        texts: dict[bytes, list[int]] = {}
        for number, pattern in enumerate(self._patterns):
            for text in pattern.any_of:
                texts.setdefault(text.encode(), []).append(number)
        self._of_text = list(texts.values())
        self._search = (
            ahocorasick_rs.BytesAhoCorasick(list(texts), implementation=Implementation.DFA)
            if texts
            else None
        )

    def scan(self, stream: Stream, leg: str, source: str, hits: dict[str, Hits]) -> str | None:
        """Read a log to its end and add what it holds to ``hits`` (by pattern name).

        Returns:
            Why the rest of the log could not be read, None when all of it was.
        """
        reading = _Reading(self, leg, source, hits)
        problem = None
        try:
            while chunk := stream.read(CHUNK_BYTES):
                reading.feed(chunk)
        except (OSError, EOFError, zlib.error) as error:
            problem = f"{source}: {error or type(error).__name__}; what came before it was read"
        reading.end()
        return problem

    def look(self, data: bytes) -> list[tuple[int, int]]:
        """(offset, number of the literal text) of all literals in the data."""
        if self._search is None:
            return []
        found = self._search.find_matches_as_indexes(data, overlapping=True)
        return [(start, text) for text, start, _ in found]


class _Reading:
    """One log being read. Whole lines are searched as they come; the last, unfinished one waits."""

    def __init__(self, scanner: Scanner, leg: str, source: str, hits: dict[str, Hits]):
        self._scanner = scanner
        self._leg = leg
        self._source = source
        self._hits = hits
        self._rest = b""
        self._line = 1

    def feed(self, chunk: bytes) -> None:
        data = self._rest + chunk if self._rest else chunk
        end = data.rfind(b"\n") + 1
        if not end and len(data) < LONGEST_LINE:
            self._rest = data
            return
        # A line that does not end: its parts are taken as lines of the same number.
        end = end or len(data)
        self._search(data[:end])
        self._rest = data[end:]

    def end(self) -> None:
        if self._rest:
            self._search(self._rest)
            self._rest = b""

    def _search(self, data: bytes) -> None:
        scanner, counted, done = self._scanner, 0, (-1, -1)
        line = self._line
        texts: set[int] = set()
        for start, text in scanner.look(data):
            if not done[0] <= start < done[1]:
                self._match(data, done, line, texts)
                texts = set()
                begin = data.rfind(b"\n", 0, start) + 1
                line += data.count(b"\n", counted, begin)
                counted = begin
                stop = data.find(b"\n", start)
                stop = len(data) if stop < 0 else stop
                if stop - begin > LONGEST_LINE:
                    begin = max(begin, start - LONGEST_LINE // 2)
                    stop = min(stop, start + LONGEST_LINE // 2)
                done = (begin, stop)
            texts.add(text)
        self._match(data, done, line, texts)
        self._line = line + data.count(b"\n", counted)

    def _match(self, data: bytes, at: tuple[int, int], line: int, texts: set[int]) -> None:
        if not texts:
            return
        text = printable(data[at[0] : at[1]].decode(errors="replace"))
        scanner = self._scanner
        for number in sorted({n for each in texts for n in scanner._of_text[each]}):
            if match := scanner._regexes[number].search(text):
                self._keep(scanner._patterns[number].name, line, text, match)

    def _keep(self, name: str, line: int, text: str, match: re.Match[str]) -> None:
        hits = self._hits.get(name)
        if hits is None:
            hits = self._hits[name] = Hits()
        hits.count += 1
        groups = {key: value for key, value in match.groupdict().items() if value is not None}
        for key, value in groups.items():
            counter = hits.values.get(key)
            if counter is None:
                counter = hits.values[key] = Counter()
            if value in counter:
                counter[value] += 1
            elif len(counter) < KEPT_VALUES:
                counter[value] = 1
        hit = Hit(self._leg, self._source, line, _around(text, match), groups)
        if len(hits.first) < KEPT_HITS:
            hits.first.append(hit)
        hits.last.append(hit)
        if len(hits.last) > KEPT_HITS:
            del hits.last[0]


def _around(text: str, match: re.Match[str]) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    begin = max(0, match.start() - SHOWN_CHARACTERS // 4)
    return f"...{text[begin : begin + SHOWN_CHARACTERS]}..."
