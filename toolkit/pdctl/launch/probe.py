"""What a running leg says of itself: health, and the last and the telling line of its log."""

import http.client
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path

NOT_LISTENING = "not listening"
ANSWERS = "/health answers"
"""How a health problem begins that the leg itself has told."""

_TAIL_BYTES = 256 * 1024
_PREFIX = re.compile(
    r"^(?:\([^)]*\)\s*)?"  # (EngineCore pid=12)
    r"(?:(?:INFO|WARNING|ERROR|DEBUG)\s+\d\d-\d\d \d\d:\d\d:\d\d\s+)?"
    r"(?:\[[^\]]*\]\s*)?"  # [core.py:1]
)
_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b|error:|ERROR\b|Fatal\b|\S+: line \d+:)|"
    r"\b(?:error: |not installed|Address already in use|NIXL_ERR_\w+|No such file)"
)
_NO_SIDE_CHANNEL = re.compile(
    r"ZMQError: (?:Address already in use|Cannot assign requested address|No such device)"
)
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|EngineCore failed to start|EngineDeadError|"
    r"See root cause above|Failed core proc|ProcessGroup|resource_tracker"
)


def health_problem(url: str, timeout: float = 2.0) -> str | None:
    """Why ``/health`` does not answer 200, or None when it does."""
    # Nothing is told to whoever answers, so that its certificate does not matter.
    anybody = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), anybody)
    try:
        with opener.open(f"{url}/health", timeout=timeout):
            return None
    except urllib.error.HTTPError as error:
        return f"{ANSWERS} {error.code}"
    except http.client.HTTPException:
        return "what listens there does not speak HTTP"
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        return NOT_LISTENING if isinstance(reason, ConnectionRefusedError) else str(reason)


def fatal_line(lines: list[str]) -> str | None:
    """A line after which a leg will never be healthy although it goes on running, or None.

    When the NIXL side channel cannot listen, vLLM waits for it for ever.
    """
    return next((line for line in lines if _NO_SIDE_CHANNEL.search(line)), None)


def last_line(lines: list[str]) -> str:
    """The last line, empty when there is none."""
    return lines[-1] if lines else ""


def error_line(lines: list[str]) -> str:
    """The line that most likely says why a leg ended; the last line when none does."""
    return telling_line(lines) or (lines or ["its log is empty"])[-1]


def telling_line(lines: list[str]) -> str | None:
    """The line that most likely says what went wrong, None when none does."""
    errors = [line for line in lines if _ERROR.search(line)]
    causes = [line for line in errors if not _CONSEQUENCE.search(line)]
    found = causes or errors
    return found[-1] if found else None


def tail(log: Path) -> list[str]:
    """The last lines with text, without vLLM's prefixes; none when there is no log."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in map(_plain, re.split(r"[\r\n]+", text)) if line]


def _plain(line: str) -> str:
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip()
    return _PREFIX.sub("", line, count=1).strip()
