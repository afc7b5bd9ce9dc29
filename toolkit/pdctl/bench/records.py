"""A run on disk: one folder, whose files ``docs/benchmark.md`` describes."""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdctl.errors import PdctlError

SCHEMA = 1
"""Version of the files' layout, in ``run.json``."""

RUN_FILE = "run.json"
ROWS_FILE = "rows.jsonl"
BLOCKS_FILE = "blocks.jsonl"
TRANSFERS_FILE = "transfers.jsonl"
ENVIRONMENT_FILE = "environment.json"
SPEC_FILE = "spec.yaml"


@dataclass(frozen=True)
class Row:
    """One turn as its client, the router and the engines saw it.

    Times are milliseconds unless a name says otherwise; None is "nobody said". ``read_*`` is the
    D->P read of this turn, ``pull_*`` decode's P->D read; ``cached_tokens`` came out of prefill's
    own prefix cache, ``decode_cached_tokens`` out of decode's. ``prefill_ms`` is what the router
    waited for prefill, ``prefill_engine_ms`` and ``decode_ttft_ms`` are the engines' own times.
    ``answer`` is a digest of the answer's tokens (or text), ``first_token`` its first token (or
    chunk of text).
    """

    arm: str
    repeat: int
    conversation: str
    turn: int
    warmup: bool = False
    started_at: float = 0.0
    gap_s: float | None = None
    target_tokens: int | None = None
    prompt_tokens: int | None = None
    tokens_read: int | None = None
    cached_tokens: int | None = None
    computed_tokens: int | None = None
    answer_tokens: int | None = None
    chunks: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    prefill_ms: float | None = None
    prefill_engine_ms: float | None = None
    decode_ttft_ms: float | None = None
    read_ms: float | None = None
    read_post_ms: float | None = None
    read_bytes: int | None = None
    read_descriptors: int | None = None
    pull_ms: float | None = None
    pull_bytes: int | None = None
    decode_cached_tokens: int | None = None
    decode_kv_usage: float | None = None
    outcome: str | None = None
    route: str | None = None
    answer: str | None = None
    first_token: str | None = None
    first_logprob: float | None = None
    error: str | None = None

    @property
    def place(self) -> tuple[str, int, int]:
        """What is the same turn in every arm."""
        return (self.conversation, self.repeat, self.turn)


@dataclass(frozen=True)
class Block:
    """One stretch of one arm on one start of the deployment.

    ``before`` and ``after`` are the engines' counters by leg, ``legs`` what each leg says of its
    settings, ``warmup`` what the warm-up of this stretch had added before ``before``.
    """

    arm: str
    repeat: int
    started_at: float
    ended_at: float
    before: dict[str, dict[str, float]] | None
    after: dict[str, dict[str, float]] | None
    legs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """All that is known of a run."""

    folder: Path
    settings: dict[str, Any]
    rows: list[Row]
    blocks: list[Block]
    transfers: list[dict[str, Any]]
    environment: dict[str, Any]

    @property
    def arms(self) -> list[dict[str, Any]]:
        arms: list[dict[str, Any]] = self.settings["arms"]
        return arms

    def arm(self, name: str) -> dict[str, Any]:
        return next(arm for arm in self.arms if arm["name"] == name)

    def measured(self, arm: str | None = None) -> list[Row]:
        """Rows without the warm-up's, of one arm or all."""
        return [row for row in self.rows if not row.warmup and arm in (None, row.arm)]

    def arm_blocks(self, arm: str) -> list[Block]:
        return [block for block in self.blocks if block.arm == arm]


@dataclass
class RunFolder:
    """A run that is being written; whole lines only, so that a killed one can go on."""

    folder: Path
    _streams: dict[str, Any] = field(default_factory=dict)

    def create(self, settings: dict[str, Any], spec: str | None) -> None:
        """Raises PdctlError if there is a run in it already or it cannot be written."""
        if (self.folder / RUN_FILE).exists():
            raise PdctlError(
                f"{self.folder}: holds a run already; give another folder, or --resume", 2
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if spec is not None:
                (self.folder / SPEC_FILE).write_text(spec, encoding="utf-8")
            self.write_settings(settings)
        except OSError as error:
            raise PdctlError(f"{self.folder}: {error.strerror}", 2) from None

    def write_settings(self, settings: dict[str, Any]) -> None:
        self._replace(RUN_FILE, settings)

    def write_environment(self, environment: dict[str, Any]) -> None:
        self._replace(ENVIRONMENT_FILE, environment)

    def add_row(self, row: Row) -> None:
        self._append(ROWS_FILE, _told(row))

    def add_block(self, block: Block) -> None:
        self._append(BLOCKS_FILE, vars(block))

    def add_transfer(self, transfer: dict[str, Any]) -> None:
        self._append(TRANSFERS_FILE, transfer)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def drop_unfinished(self) -> None:
        """Forget stretches that were cut off, whose block was never written, and those in which
        a turn failed."""
        run = load_run(self.folder)
        failed = {(row.arm, row.repeat) for row in run.rows if row.error is not None}
        blocks = [block for block in run.blocks if (block.arm, block.repeat) not in failed]
        kept = {(block.arm, block.repeat) for block in blocks}
        self._rewrite(BLOCKS_FILE, [vars(block) for block in blocks])
        self._rewrite(ROWS_FILE, [_told(row) for row in run.rows if (row.arm, row.repeat) in kept])

    def _rewrite(self, name: str, lines: list[dict[str, Any]]) -> None:
        draft = self.folder / f".{name}.new"
        with draft.open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)
        draft.rename(self.folder / name)

    def _replace(self, name: str, value: dict[str, Any]) -> None:
        draft = self.folder / f".{name}.new"
        draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        draft.rename(self.folder / name)

    def _append(self, name: str, value: dict[str, Any]) -> None:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = (self.folder / name).open("a", encoding="utf-8")
        stream.write(json.dumps(value) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _told(row: Row) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if value is not None}


def load_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        PdctlError: it holds no run, or one of another version.
    """
    settings = _json(folder / RUN_FILE)
    if settings is None:
        raise PdctlError(f"{folder}: holds no run ({RUN_FILE} is missing)", 2)
    if settings.get("schema") != SCHEMA or not isinstance(settings.get("arms"), list):
        raise PdctlError(f"{folder / RUN_FILE}: is no run of version {SCHEMA} of pdctl bench", 2)
    return Run(
        folder=folder,
        settings=settings,
        rows=[_of(Row, line, folder / ROWS_FILE) for line in _lines(folder / ROWS_FILE)],
        blocks=[_of(Block, line, folder / BLOCKS_FILE) for line in _lines(folder / BLOCKS_FILE)],
        transfers=list(_lines(folder / TRANSFERS_FILE)),
        environment=_json(folder / ENVIRONMENT_FILE) or {},
    )


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PdctlError(f"{path}: {error.strerror}", 2) from None
    except ValueError:
        raise PdctlError(f"{path}: is not JSON", 2) from None
    if not isinstance(value, dict):
        raise PdctlError(f"{path}: is not a JSON object", 2)
    return value


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except OSError as error:
        raise PdctlError(f"{path}: {error.strerror}", 2) from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError:
            # The last line of a killed run may be cut off.
            if text.endswith("\n") or number < text.count("\n") + 1:
                raise PdctlError(f"{path}:{number}: is not JSON", 2) from None


def _of(kind: type[Any], values: dict[str, Any], path: Path) -> Any:
    known = {each.name for each in dataclasses.fields(kind)}
    try:
        return kind(**{name: value for name, value in values.items() if name in known})
    except TypeError as error:
        raise PdctlError(f"{path}: a line lacks what it needs ({error})", 2) from None
