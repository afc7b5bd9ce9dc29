"""Reading what may be hostile: tar files and gzip streams, with limits, without writing."""

from __future__ import annotations

import codecs
import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl.doctor.evidence.scan import Stream
from pdctl.doctor.evidence.text import UTF16_MARKS, printable
from pdctl.errors import PdctlError

_GZIP = b"\x1f\x8b"
_FREE_BYTES = 1 << 30
"""So much may come out of a compressed file however small that is."""
_MOST_RATIO = 300
"""More expansion than this beyond the free bytes is no log: those shrink 5 to 100 times."""
_HEADER_BYTES = 16 << 20
"""Most bytes that headers between two files of an archive may take."""


class Refused(Exception):
    """It is not read any further; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One file of a bundle. ``name`` is relative to it, with slashes."""

    name: str
    stream: Stream


class _Counted(io.RawIOBase):
    """A file that knows how much was read of it."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


class _Expanded:
    """A gzip stream that ends with :class:`Refused` when too much comes out of it."""

    def __init__(self, stream: Stream):
        self._packed = _Counted(stream)
        self._gzip = gzip.GzipFile(fileobj=io.BufferedReader(self._packed, 1 << 16))
        self._count = 0
        self.budget: int | None = None

    def read(self, size: int = -1, /) -> bytes:
        # Not read(): that loses what it has when the stream breaks off.
        data = self._gzip.read1(size)
        self._count += len(data)
        if self._count > _FREE_BYTES and self._count > _MOST_RATIO * self._packed.count:
            raise OSError(
                f"it expands more than {_MOST_RATIO} times; refused as a decompression bomb"
            )
        if self.budget is not None:
            self.budget -= len(data)
            if self.budget < 0:
                raise OSError("the archive's headers are too large; refused")
        return data


class _Plain:
    """An uncompressed archive with the same limit on headers."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self.budget: int | None = None

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        if self.budget is not None:
            self.budget -= len(data)
            if self.budget < 0:
                raise OSError("the archive's headers are too large; refused")
        return data


class _Utf8:
    """A text as UTF-8, whether it is that or UTF-16 with a mark (as PowerShell's ``>`` writes)."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._decoder: codecs.IncrementalDecoder | None = None
        self._begun = False

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        if not self._begun and data.startswith(UTF16_MARKS):
            self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._begun = True
        return self._decoder.decode(data, not data).encode() if self._decoder else data


def unzipped(entry: Entry) -> Stream:
    """The content of a log, expanded when its name says that it is compressed."""
    packed = entry.name.endswith(".gz")
    return _Utf8(_Expanded(entry.stream) if packed else entry.stream)


def open_tar(path: Path, gaps: list[str]) -> Iterator[Entry]:
    """The regular files of a tar file, one after the other; each must be read before the next.

    An archive that breaks off gives what came before; the rest is a gap.

    Raises:
        PdctlError: it is no tar file (code 2).
    """
    with path.open("rb") as file:
        packed = file.peek(2)[:2] == _GZIP
        source = _Expanded(file) if packed else _Plain(file)
        count = 0
        try:
            source.budget = _HEADER_BYTES
            with tarfile.open(fileobj=source, mode="r|") as archive:  # type: ignore[call-overload]
                while (member := archive.next()) is not None:
                    count += 1
                    source.budget = None
                    yield from _member(archive, member, gaps)
                    source.budget = _HEADER_BYTES
        except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
            if not count:
                raise PdctlError(
                    f"{path}: is not a bundle ({error}); a folder or a .tar or .tar.gz file", 2
                ) from None
            gaps.append(f"{path.name}: {error}; what came before it was read")


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, gaps: list[str]) -> Iterator[Entry]:
    if member.isdir():
        return
    if member.issparse():
        # A few bytes may stand for terabytes of zeros.
        gaps.append(f"{printable(member.name)[:200]}: refused, it is sparse (pack it without -S)")
        return
    stream = archive.extractfile(member) if member.isreg() else None
    if stream is None:
        gaps.append(f"{printable(member.name)[:200]}: refused, it is not a regular file")
        return
    yield Entry(member.name, stream)
    # What was not read of it must not count as a header.
    while stream.read(1 << 20):
        pass
