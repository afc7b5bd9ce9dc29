"""vLLM's ``benchmarks/multi_turn/benchmark_serving_multi_turn.py``, out of a checkout of vLLM."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdctl.bench.records import Row
from pdctl.bench.upstream import read_stats
from pdctl.bench.words import fresh_text
from pdctl.errors import PdctlError

if TYPE_CHECKING:
    from pdctl.bench.adapters.run import Foreign

SCRIPT = "benchmark_serving_multi_turn.py"
STATS = "stats.json"
INPUT = "input.json"
_CHARACTERS_PER_TOKEN = 4


def command(asked: "Foreign", work: Path) -> list[str]:
    """Raises PdctlError without the script or a tokenizer (exit code 2)."""
    script = asked.program
    if script is None or not script.is_file():
        raise PdctlError(f"--client multiturn needs --program .../{SCRIPT} of a vLLM checkout", 2)
    if asked.tokenizer is None:
        raise PdctlError("--client multiturn needs --tokenizer, the model's folder", 2)
    source = asked.trace
    if source is None:
        source = work / INPUT
        source.write_text(json.dumps(_conversations(asked)), encoding="utf-8")
    # It needs pandas and more; a wrapper can start it with an interpreter that has them.
    start = [sys.executable] if script.suffix == ".py" else []
    return [
        *start,
        str(script.absolute()),
        "--input-file", str(source.absolute()),
        "--model", str(asked.tokenizer.absolute()),
        "--served-model-name", asked.target.model,
        "--url", asked.target.url,
        "--num-clients", "1",
        "--max-active-conversations", str(asked.concurrency),
        "--request-timeout-sec", "600",
        "--limit-min-tokens", str(asked.answer_tokens),
        "--limit-max-tokens", str(asked.answer_tokens),
        "--send-conversation-id",
        "--stats-json-output", str(work / STATS),
    ]  # fmt: skip


def _conversations(asked: "Foreign") -> list[dict[str, Any]]:
    """The generator of the script needs a text file to draw from; this needs none."""
    conversations = []
    for number in range(asked.conversations):
        messages = []
        for turn in range(asked.turns):
            seed = f"{asked.seed}/{number}/{turn}"
            text = fresh_text(seed, asked.new_tokens * _CHARACTERS_PER_TOKEN)
            messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "x"},
            ]
        conversations.append({"id": f"conversation-{number}", "messages": messages})
    return conversations


def rows(work: Path, arm: str) -> list[Row]:
    return read_stats(work / STATS, arm)
