"""AIPerf (PyPI ``aiperf``, 0.13): its command line and its ``profile_export.jsonl``.

It needs an environment of its own: ``python3 -m venv v && v/bin/pip install aiperf``, then
``--program v/bin/aiperf``.
"""

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdctl.bench.records import Row
from pdctl.errors import PdctlError

if TYPE_CHECKING:
    from pdctl.bench.adapters.run import Foreign

EXPORT = "profile_export.jsonl"
SESSION_HEADER = "X-Session-ID"
BUILTIN_TOKENIZER = "builtin"
"""AIPerf's own, which it fetches over the network."""


def command(asked: "Foreign", work: Path) -> list[str]:
    program = str(asked.program or "aiperf")
    words = [
        program, "profile",
        "--model", asked.target.model,
        "--url", asked.target.url,
        "--endpoint-type", "chat",
        "--streaming",
        "--session-header", asked.target.session_header or SESSION_HEADER,
        "--conversation-num", str(asked.conversations),
        "--conversation-turn-mean", str(asked.turns),
        "--conversation-turn-stddev", "0",
        "--prompt-input-tokens-mean", str(asked.new_tokens),
        "--prompt-input-tokens-stddev", "0",
        "--prompt-output-tokens-mean", str(asked.answer_tokens),
        "--concurrency", str(asked.concurrency),
        "--num-warmup-sessions", "1",
        "--tokenizer", str(asked.tokenizer.absolute() if asked.tokenizer else BUILTIN_TOKENIZER),
        "--random-seed", str(zlib.crc32(asked.seed.encode())),
        "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true",
        "--extra-inputs", "temperature:0",
        "--output-artifact-dir", str(work),
        "--ui", "none",
        "--no-gpu-telemetry",
        "--no-server-metrics",
    ]  # fmt: skip
    return [*words, "--api-key", asked.target.key] if asked.target.key else words


def rows(work: Path, arm: str) -> list[Row]:
    """One row per request of the profiling phase.

    Raises:
        PdctlError: the export is missing or not of this form.
    """
    path = work / EXPORT
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = [_row(record, arm) for record in records]
    except OSError as error:
        raise PdctlError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise PdctlError(f"{path}: is no AIPerf export ({error!r})") from None
    return [row for row in found if row is not None]


def _row(record: dict[str, Any], arm: str) -> Row | None:
    about, metrics = record["metadata"], record.get("metrics") or {}
    if about.get("benchmark_phase") != "profiling":
        return None

    def value(name: str) -> Any:
        found = (metrics.get(name) or {}).get("value")
        return found if isinstance(found, int | float) else None

    error = record.get("error")
    return Row(
        arm=arm,
        repeat=1,
        conversation=str(about["x_correlation_id"]),
        turn=int(about["turn_index"]) + 1,
        started_at=about["request_start_ns"] / 1e9,
        prompt_tokens=value("usage_prompt_tokens") or value("input_sequence_length"),
        answer_tokens=value("usage_completion_tokens") or value("output_sequence_length"),
        ttft_ms=value("time_to_first_token"),
        tpot_ms=value("inter_token_latency"),
        latency_ms=value("request_latency"),
        error=None if error is None else str(error)[:300],
    )
