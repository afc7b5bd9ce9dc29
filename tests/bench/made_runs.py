"""Folders of runs as pdctl bench leaves them, made up: sound ones, and ones with a fault."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTHS = (1024, 2048, 4096)
ANSWER = 16
OPENING = LENGTHS[0] // 2

Rows = list[dict[str, Any]]
Blocks = list[dict[str, Any]]


class MadeRun:
    """A sound run; tests change its parts and write it."""

    def __init__(
        self,
        arms: tuple[dict[str, Any], ...] = (
            {"name": "off", "bidirectional": False, "route": None},
            {"name": "on", "bidirectional": True, "route": None, "asks": "readback"},
        ),
        repeats: int = 4,
        dtype: str = "float32",
        compute_ms: Callable[[int], float] = lambda tokens: 20 + 0.4 * tokens,
        read_ms: Callable[[int], float] = lambda tokens: 12 + 0.003 * tokens,
        lengths: tuple[int, ...] = LENGTHS,
    ) -> None:
        self.settings: dict[str, Any] = {
            "schema": 1,
            "id": "made",
            "created": "2026-01-01T00:00:00+0000",
            "state": "complete",
            "spec": "made",
            "command": "pdctl bench made.yaml",
            "arms": [dict(arm) for arm in arms],
            "repeats": repeats,
            "rounds": 1,
            "seed": "s",
            "endpoint": "chat",
            "workload": {
                "kind": "sweep/grow",
                "conversations": 1,
                "turns": len(lengths) + 1,
                "load": {"concurrency": 1, "rate": None},
            },
            "error_share": 0.05,
            "about": {
                "model": "canary",
                "dtype": dtype,
                "device": "cpu",
                "recompute_threshold": 64,
                "decode_ttl_s": 480.0,
                "prefill_prefix_caching": False,
            },
        }
        self.rows: Rows = []
        self.blocks: Blocks = []
        self.transfers: Rows = []
        draw = random.Random(1)
        for arm in arms:
            for repeat in range(1, repeats + 1):
                self._stretch(arm, repeat, draw, compute_ms, read_ms, lengths)

    def _stretch(
        self,
        arm: dict[str, Any],
        repeat: int,
        draw: random.Random,
        compute_ms: Callable[[int], float],
        read_ms: Callable[[int], float],
        lengths: tuple[int, ...],
    ) -> None:
        reads_back = arm.get("bidirectional")
        held = computed = external = moved = 0
        for turn, length in enumerate((lengths[0] // 2, *lengths), 1):
            read = held if reads_back and turn > 1 else 0
            noise = draw.uniform(0.97, 1.03)
            prefill = (
                compute_ms(length) - compute_ms(read) if read else compute_ms(length)
            ) * noise
            row = {
                "arm": arm["name"],
                "repeat": repeat,
                "conversation": "sweep",
                "turn": turn,
                "started_at": 1000.0 + turn,
                "target_tokens": length,
                "prompt_tokens": length,
                "tokens_read": read,
                "cached_tokens": 0,
                "computed_tokens": length - read,
                "decode_cached_tokens": 0,
                "answer_tokens": ANSWER,
                "chunks": ANSWER,
                "tpot_ms": 10.0 * noise,
                "latency_ms": 900.0,
                "outcome": "hit" if read else "miss" if reads_back else "disabled",
                "answer": f"answer-{repeat}-{turn}",
                "first_token": "x",
                "decode_kv_usage": 0.1,
            }
            if read:
                prefill += read_ms(read)
                row |= {
                    "read_ms": read_ms(read),
                    "read_post_ms": 1.0,
                    "read_bytes": read * 4096,
                    "read_descriptors": 8,
                }
                moved += read * 4096
            row |= {"prefill_ms": round(prefill, 3), "ttft_ms": round(prefill + 30 * noise, 3)}
            self.rows.append(row)
            computed += length - read
            external += read
            held = length + ANSWER - 1
        zero = {"computed_tokens": 0.0, "local_tokens": 0.0, "external_tokens": 0.0}
        after = {"computed_tokens": computed, "local_tokens": 0, "external_tokens": external}
        if moved:
            after |= {"nixl_bytes": moved, "nixl_transfers": len(lengths)}
        told = {
            "source": "log",
            "bidirectional": bool(reads_back),
            "recompute_threshold": 64,
        }
        self.blocks.append(
            {
                "arm": arm["name"],
                "repeat": repeat,
                "started_at": 1000.0,
                "ended_at": 1010.0,
                "before": {"prefill-0": zero, "decode-0": {"kv_tokens": 262144}},
                "after": {
                    "prefill-0": after,
                    "decode-0": {"kv_tokens": 262144, "kv_usage": 0.1, "block_size": 128},
                },
                "legs": {"prefill-0": dict(told), "decode-0": dict(told)},
            }
        )

    def of(self, arm: str, turn: int | None = None) -> Rows:
        return [row for row in self.rows if row["arm"] == arm and turn in (None, row["turn"])]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(self.settings))
        for name, lines in (
            ("rows.jsonl", self.rows),
            ("blocks.jsonl", self.blocks),
            ("transfers.jsonl", self.transfers),
        ):
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder
