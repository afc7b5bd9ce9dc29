"""Reading logs once for all patterns: gigabytes of them, in one pass and flat memory.

All literal texts of all patterns are searched at once (Aho-Corasick); only a line that holds one
of them becomes text and is matched.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import ahocorasick_rs

from pdctl.doctor.evidence.facts import KEPT_HITS, KEPT_VALUES, Hit, Hits, add
from pdctl.doctor.evidence.text import printable
from pdctl.doctor.model import LONGEST_VALUE, TIME_OF_DAY, Pattern

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 16
"""Of a longer line only the part around a literal text is matched."""
MOST_PARTS = 64
"""Parts of one endless line that are matched."""
SHOWN_CHARACTERS = 2000
_MOST_COMBINATIONS = 10_000


class Stream(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class Scanner:
    """Searches logs for patterns. One scanner serves any number of logs."""

    def __init__(self, patterns: Iterable[Pattern]):
        unique = {pattern.name: pattern for pattern in patterns}
        self.patterns = list(unique.values())
        self.regexes = [re.compile(pattern.regex or "") for pattern in self.patterns]
        self.groups = [tuple(regex.groupindex.items()) for regex in self.regexes]
        texts: dict[bytes, list[int]] = {}
        for number, pattern in enumerate(self.patterns):
            for text in pattern.any_of:
                texts.setdefault(text.encode(), []).append(number)
        self._of_text = [tuple(numbers) for numbers in texts.values()]
        self._of_texts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._search = (
            ahocorasick_rs.BytesAhoCorasick(
                list(texts), implementation=ahocorasick_rs.Implementation.DFA
            )
            if texts
            else None
        )

    def scan(self, stream: Stream, leg: str, source: str, hits: dict[str, Hits]) -> str | None:
        """Read a log to its end and add what it holds to ``hits`` (by pattern name).

        Returns:
            Why the rest of the log could not be read, None when all of it was.
        """
        reading = _Reading(self)
        problem = None
        try:
            while chunk := stream.read(CHUNK_BYTES):
                reading.feed(chunk)
        except (OSError, EOFError, zlib.error) as error:
            problem = f"{source}: {error or type(error).__name__}; what came before it was read"
        for name, found in reading.end(leg, source):
            add(hits.setdefault(name, Hits()), found)
        return problem

    def look(self, data: bytes) -> list[tuple[int, int, int]]:
        """(number of the literal text, begin, end) of all literals in the data."""
        return self._search.find_matches_as_indexes(data, overlapping=True) if self._search else []

    def candidates(self, texts: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of the patterns that a line with these literals may match."""
        if len(texts) == 1:
            return self._of_text[texts[0]]
        found = self._of_texts.get(texts)
        if found is None:
            found = tuple(sorted({number for text in texts for number in self._of_text[text]}))
            if len(self._of_texts) < _MOST_COMBINATIONS:
                self._of_texts[texts] = found
        return found


class _Tally:
    """What one log holds of one pattern, as cheaply as a line can be counted."""

    __slots__ = ("count", "first", "last", "pattern", "times", "values")

    def __init__(self, pattern: Pattern, groups: tuple[tuple[str, int], ...]):
        self.pattern = pattern
        self.count = 0
        self.first: list[tuple[int, re.Match[str]]] = []
        self.last: deque[tuple[int, re.Match[str]]] = deque(maxlen=KEPT_HITS)
        counted = groups if pattern.counted else ()
        self.values: list[tuple[str, int, dict[str, int]]] = [(n, g, {}) for n, g in counted]
        self.times: dict[str, int] | None = {} if pattern.timed and pattern.counted else None

    def add(self, line: int, match: re.Match[str]) -> None:
        self.count += 1
        if self.count <= KEPT_HITS:
            self.first.append((line, match))
        self.last.append((line, match))
        for _, group, counts in self.values:
            if (value := match[group]) is not None:
                _count(counts, value[:LONGEST_VALUE])
        if self.times is not None and (when := TIME_OF_DAY.search(match.string, 0, match.start())):
            _count(self.times, when[0])

    def hits(self, leg: str, source: str) -> Hits:
        def made(kept: Iterable[tuple[int, re.Match[str]]]) -> list[Hit]:
            groups = self.pattern.groups
            return [Hit(leg, source, line, _around(match), groups(match)) for line, match in kept]

        counted = [(name, counts) for name, _, counts in self.values]
        counted.append(("when", self.times or {}))
        values = {name: Counter(counts) for name, counts in counted if counts}
        return Hits(self.count, made(self.first), made(self.last), values)


def _count(counts: dict[str, int], value: str) -> None:
    if value in counts:
        counts[value] += 1
    elif len(counts) < KEPT_VALUES:
        counts[value] = 1


class _Reading:
    """One log being read. Whole lines are searched as they come; the last, unfinished one waits."""

    def __init__(self, scanner: Scanner):
        self._scanner = scanner
        self._tallies: dict[int, _Tally] = {}
        self._rest = b""
        self._line = 1
        self._long_line = 0
        self._parts = 0

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

    def end(self, leg: str, source: str) -> Iterator[tuple[str, Hits]]:
        """What was found, by pattern name."""
        if self._rest:
            self._search(self._rest)
            self._rest = b""
        for number, tally in self._tallies.items():
            yield self._scanner.patterns[number].name, tally.hits(leg, source)

    def _search(self, data: bytes) -> None:
        line, counted, begin, stop = self._line, 0, 0, -1
        texts: tuple[int, ...] = ()
        for text, start, _ in self._scanner.look(data):
            if start < stop:
                if texts and text not in texts:
                    texts = (*texts, text)
                continue
            if texts:
                self._match(data[begin:stop], line, texts)
            texts = (text,)
            begin = data.rfind(b"\n", 0, start) + 1
            line += data.count(b"\n", counted, begin)
            counted = begin
            stop = data.find(b"\n", start)
            stop = len(data) if stop < 0 else stop
            if stop - begin > LONGEST_LINE:
                if self._is_garbage(line):
                    texts = ()
                    continue
                begin = max(begin, start - LONGEST_LINE // 2)
                stop = min(stop, start + LONGEST_LINE // 2)
        if texts:
            self._match(data[begin:stop], line, texts)
        self._line = line + data.count(b"\n", counted)

    def _is_garbage(self, line: int) -> bool:
        """Whether enough was matched of an endless line."""
        self._parts = self._parts + 1 if line == self._long_line else 0
        self._long_line = line
        return self._parts >= MOST_PARTS

    def _match(self, raw: bytes, line: int, texts: tuple[int, ...]) -> None:
        text = printable(raw.decode(errors="replace"))
        scanner, tallies = self._scanner, self._tallies
        for number in scanner.candidates(texts):
            if match := scanner.regexes[number].search(text):
                tally = tallies.get(number)
                if tally is None:
                    tally = _Tally(scanner.patterns[number], scanner.groups[number])
                    tallies[number] = tally
                tally.add(line, match)


def _around(match: re.Match[str]) -> str:
    text = match.string
    if len(text) <= SHOWN_CHARACTERS:
        return text
    begin = max(0, match.start() - SHOWN_CHARACTERS // 4)
    return f"...{text[begin : begin + SHOWN_CHARACTERS]}..."
