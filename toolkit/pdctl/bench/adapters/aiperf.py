"""AIPerf (PyPI ``aiperf``, 0.13): its command line and its ``profile_export.jsonl``.

It needs an environment of its own: ``python3 -m venv v && v/bin/pip install aiperf``, then
``--program v/bin/aiperf``.
"""

import asyncio
import dataclasses
import json
import uuid
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdctl.bench.records import Row
from pdctl.bench.tokens import LocalTokenizer, text_of_tokens
from pdctl.bench.trace import OPENING_TOKENS, trace
from pdctl.bench.workload import Conversation, Load
from pdctl.errors import PdctlError

if TYPE_CHECKING:
    from pdctl.bench.adapters.run import Foreign

EXPORT = "profile_export.jsonl"
INPUT = "input.jsonl"
SESSION_HEADER = "X-Session-ID"
BUILTIN_TOKENIZER = "builtin"
"""AIPerf's own, which it fetches over the network."""


def command(asked: "Foreign", work: Path) -> list[str]:
    """With one conversation more than asked for: the first is the warm-up. AIPerf's own warm-up
    sends conversations that are measured again afterwards, out of a warm cache.

    Raises:
        PdctlError: the trace is none that AIPerf can be given (exit code 2).
    """
    program = str(asked.program or "aiperf")
    words = [
        program, "profile",
        "--model", asked.target.model,
        "--url", asked.target.url,
        "--endpoint-type", "chat",
        "--streaming",
        "--session-header", asked.target.session_header or SESSION_HEADER,
        *(_generated(asked) if asked.trace is None else _replayed(asked, asked.trace, work)),
        "--concurrency", str(asked.concurrency),
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


def _generated(asked: "Foreign") -> list[str]:
    return [
        "--conversation-num", str(asked.conversations + 1),
        "--conversation-turn-mean", str(asked.turns),
        "--conversation-turn-stddev", "0",
        "--prompt-input-tokens-mean", str(asked.new_tokens),
        "--prompt-input-tokens-stddev", "0",
        "--prompt-output-tokens-mean", str(asked.answer_tokens),
    ]  # fmt: skip


def _replayed(asked: "Foreign", file: Path, work: Path) -> list[str]:
    """The trace as AIPerf reads it, each conversation beginning as pdctl's own client begins it."""
    if asked.tokenizer is None:
        raise PdctlError("--client aiperf with --trace needs --tokenizer, the model's folder", 2)
    planned = trace(file, asked.answer_tokens, asked.seed, Load())
    tokenizer = LocalTokenizer(asked.tokenizer)
    conversations = [*planned.warmup, *planned.conversations]
    lines = [asyncio.run(_session(file, each, tokenizer)) for each in conversations]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (work / INPUT).write_text(text, encoding="utf-8")
    return [
        "--input-file", str(work / INPUT),
        "--custom-dataset-type", "multi_turn",
        "--conversation-num", str(len(lines)),
    ]  # fmt: skip


async def _session(
    file: Path, conversation: Conversation, tokenizer: LocalTokenizer
) -> dict[str, Any]:
    opening = await text_of_tokens(tokenizer, "system", uuid.uuid4().hex, OPENING_TOKENS)
    turns: list[dict[str, Any]] = [{"role": "system", "text": opening}]
    for turn in conversation.turns:
        texts = [part.text for part in turn.parts if part.role == "user"]
        if len(texts) != 1 or texts[0] is None:
            raise PdctlError(
                f"{file}: AIPerf takes one user message a turn, {conversation.id} has another form",
                2,
            )
        turns.append({"role": "user", "text": texts[0], "output_length": turn.answer_tokens})
    return {"session_id": conversation.id, "turns": turns}


def rows(work: Path, arm: str) -> list[Row]:
    """One row per request; those of the conversation that began first are the warm-up's.

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
    if not found:
        return []
    first = min(found, key=lambda row: row.started_at).conversation
    return [dataclasses.replace(row, warmup=row.conversation == first) for row in found]


def _row(record: dict[str, Any], arm: str) -> Row:
    about, metrics = record["metadata"], record.get("metrics") or {}

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
