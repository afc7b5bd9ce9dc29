"""Writing a bundle as one compressed tar file."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ahocorasick_rs
import yaml

from pdctl.doctor.evidence import redact
from pdctl.doctor.evidence.processes import Collected
from pdctl.errors import PdctlError

CHUNK_BYTES = 1 << 20

Say = Callable[[str], None]


def pack(found: Collected, target: Path, say: Say) -> int:
    """Write a bundle: what was collected, the logs without secrets and prompts, and a manifest.

    Returns:
        Bytes of the file.

    Raises:
        PdctlError: it cannot be written; what was there before is unchanged (code 2).
    """
    new = target.with_name(f".{target.name}.new")
    try:
        with new.open("wb") as raw:
            new.chmod(0o600)
            with (
                gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w|") as archive,
            ):
                _fill(archive, found, say)
        new.rename(target)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise PdctlError(f"{target}: cannot be written: {error.strerror}", 2) from None
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return target.stat().st_size


def _fill(archive: tarfile.TarFile, found: Collected, say: Say) -> None:
    manifest: list[dict[str, object]] = []
    for path in sorted(found.folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(found.folder).as_posix()
            data = path.read_bytes()
            _add(archive, name, io.BytesIO(data), len(data))
            manifest.append({"name": name, "bytes": len(data)})
    for leg, logs in found.logs.items():
        for log in logs:
            manifest.append(_log(archive, f"{leg}/log.txt", log, say))
    for leg, logs in found.earlier_logs.items():
        for log in logs:
            # Of earlier starts: for people, and not read as the log of this one.
            name = f"{leg}/earlier/start-{log.name.rpartition('.')[2]}.txt"
            manifest.append(_log(archive, name, log, say))
    text = yaml.safe_dump({"files": manifest}, sort_keys=False).encode()
    _add(archive, "manifest.yaml", io.BytesIO(text), len(text))


def _log(archive: tarfile.TarFile, name: str, log: Path, say: Say) -> dict[str, object]:
    size = log.stat().st_size
    say(f"packing {log} ({size / 1e6:.1f} MB)")
    # A tar member's size stands before its content: the redacted log is written out first.
    with tempfile.TemporaryFile(dir=None) as copy:
        lines = redacted_copy(log, copy)
        length = copy.tell()
        copy.seek(0)
        _add(archive, name, copy, length)
    return {"name": name, "bytes": length, "from": str(log), "redacted_lines": lines}


def _add(archive: tarfile.TarFile, name: str, content: io.IOBase, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o600
    member.mtime = int(time.time())
    archive.addfile(member, content)


_HINTS = ahocorasick_rs.BytesAhoCorasick([hint.encode() for hint in redact.HINTS])


def redacted_copy(source: Path, target: io.IOBase | tempfile._TemporaryFileWrapper[bytes]) -> int:
    """Copy a log without secrets and prompts, in pieces of flat size.

    Returns:
        How many lines were changed.
    """
    changed = 0
    rest = b""
    with source.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            data = rest + chunk
            end = data.rfind(b"\n") + 1
            if not end and len(data) < 8 * CHUNK_BYTES:
                rest = data
                continue
            end = end or len(data)
            clean, lines = _redacted(data[:end])
            target.write(clean)
            changed += lines
            rest = data[end:]
        clean, lines = _redacted(rest)
        target.write(clean)
    return changed + lines


def _redacted(data: bytes) -> tuple[bytes, int]:
    parts, done, changed = [], 0, 0
    for _, start, _ in _HINTS.find_matches_as_indexes(data):
        if start < done:
            continue
        begin = data.rfind(b"\n", done, start) + 1 or done
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        line = data[begin:stop]
        clean = redact.text(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        parts += [data[done:begin], clean]
        changed += clean != line
        done = stop
    return b"".join([*parts, data[done:]]), changed
