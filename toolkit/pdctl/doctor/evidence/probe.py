"""Two turns of one conversation through the router, as evidence."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from pdctl.conversation import Messages, stream_turn, user_text
from pdctl.errors import PdctlError
from pdctl.plan import Deployment

PROBE_SECONDS = 60.0
"""Longest wait for anything of a probe turn."""
_CHARACTERS = 2000
_ANSWER_TOKENS = 8


def hold_probe(deployment: Deployment, folder: Path) -> None:
    """Hold them, and write what came of it; a failure is evidence too."""
    found: dict[str, Any] = {"bidirectional": deployment.bidirectional, "turns": []}
    messages: Messages = []
    conversation = f"pdctl-doctor-{uuid.uuid4().hex}"
    with httpx.Client(timeout=httpx.Timeout(PROBE_SECONDS, connect=3.0), trust_env=False) as client:
        for number in (1, 2):
            text = user_text(f"{conversation}-{number}", _CHARACTERS if number == 1 else 200)
            messages.append({"role": "user", "content": text})
            begin = time.perf_counter()
            try:
                turn = stream_turn(
                    client,
                    deployment.router.url,
                    deployment.served_name,
                    messages,
                    _ANSWER_TOKENS,
                    conversation,
                )
            except PdctlError as error:
                found["error"] = str(error)
                break
            messages.append({"role": "assistant", "content": turn.text})
            row = dataclasses.asdict(turn)
            del row["text"]
            found["turns"].append(row | {"seconds": round(time.perf_counter() - begin, 3)})
    path = folder / deployment.router.name / "http" / "probe.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# two streamed turns of one conversation\n{json.dumps(found)}\n")
