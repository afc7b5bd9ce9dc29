"""The per-request statistics of vLLM's multi-turn benchmark (``--stats-json-output``).

A JSON list of rows with ``ttft_ms``, ``tpot_ms``, ``latency_ms``, ``start_time_ms``,
``input_num_turns``, ``input_num_tokens``, ``output_num_tokens``, ``output_num_chunks``,
``output_num_first_chunk_tokens``, ``approx_cached_percent``, ``conversation_id``, ``client_id``
(``benchmarks/multi_turn/benchmark_serving_multi_turn.py``, ``RequestStats``).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pdctl.bench.records import Row, Run
from pdctl.errors import PdctlError


def read_stats(path: Path, arm: str) -> list[Row]:
    """Rows from such a file; turns count user messages of the input.

    Raises:
        PdctlError: it is not such a file (exit code 2).
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [_row(entry, arm) for entry in entries]
    except OSError as error:
        raise PdctlError(f"{path}: {error.strerror}", 2) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PdctlError(f"{path}: is no multi-turn benchmark statistics ({error!r})", 2) from None


def _row(entry: dict[str, Any], arm: str) -> Row:
    return Row(
        arm=arm,
        repeat=1,
        conversation=str(entry["conversation_id"]),
        # The input holds user and assistant messages; a request ends with the user's.
        turn=(int(entry["input_num_turns"]) + 1) // 2,
        started_at=float(entry["start_time_ms"]) / 1000,
        prompt_tokens=int(entry["input_num_tokens"]),
        answer_tokens=int(entry["output_num_tokens"]),
        chunks=int(entry["output_num_chunks"]),
        ttft_ms=float(entry["ttft_ms"]),
        tpot_ms=float(entry["tpot_ms"]),
        latency_ms=float(entry["latency_ms"]),
    )


def write_stats(run: Run, path: str) -> list[Path]:
    """The measured rows in that format: one file, or one for each arm where ``{arm}`` stands."""
    if "{arm}" in path:
        named = {arm["name"]: Path(path.replace("{arm}", arm["name"])) for arm in run.arms}
        for arm, file in named.items():
            _write(file, run.measured(arm))
        return list(named.values())
    _write(Path(path), run.measured())
    return [Path(path)]


def _write(file: Path, rows: Iterable[Row]) -> None:
    entries = [_entry(row) for row in rows if row.error is None and row.ttft_ms is not None]
    file.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _entry(row: Row) -> dict[str, Any]:
    cached = 100.0 * (row.tokens_read or 0) / row.prompt_tokens if row.prompt_tokens else 0.0
    return {
        "ttft_ms": row.ttft_ms,
        "tpot_ms": row.tpot_ms or 0.0,
        "latency_ms": row.latency_ms,
        "start_time_ms": row.started_at * 1000,
        "input_num_turns": 2 * row.turn - 1,
        "input_num_tokens": row.prompt_tokens or row.target_tokens or 0,
        "output_num_tokens": row.answer_tokens or 0,
        "output_num_chunks": row.chunks or 0,
        "output_num_first_chunk_tokens": 1,
        "approx_cached_percent": round(cached, 2),
        "conversation_id": f"{row.conversation}-{row.repeat}",
        "client_id": 0,
    }
