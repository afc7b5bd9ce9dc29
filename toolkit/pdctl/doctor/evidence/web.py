"""HTTP answers as evidence: asking for them, and their text form in a bundle."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx

from pdctl.doctor.evidence.facts import Capture

TIMEOUT_SECONDS = 3.0
_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Answer:
    """An answer to a GET. ``status`` is None when there was none, ``error`` says why. ``sent`` is
    Unix time, ``took`` seconds."""

    path: str
    status: int | None
    error: str
    headers: dict[str, str]
    body: str
    sent: float
    took: float

    def text(self) -> str:
        """As it is kept in a bundle."""
        lines = [f"GET {self.path}", f"# sent {self.sent:.3f}, took {self.took:.3f} s"]
        if self.status is None:
            return "\n".join([*lines, f"# no answer: {self.error}", ""])
        lines.append(f"HTTP/1.1 {self.status}")
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\n".join([*lines, "", self.body])

    @property
    def clock_offset(self) -> float | None:
        """Seconds that the answering machine's clock is ahead of the asking one's; HTTP dates have
        whole seconds, so it is good to about one second."""
        try:
            date = parsedate_to_datetime(self.headers["date"]).timestamp()
        except (KeyError, ValueError, TypeError):
            return None
        return date + 0.5 - (self.sent + self.took / 2)


_KEPT_HEADERS = ("date", "server", "content-type")
_HEAD = re.compile(r"^GET (\S+)\n# sent ([0-9.]+), took ([0-9.]+) s\n(.*)$", re.DOTALL)


def get(client: httpx.Client, url: str, path: str, headers: dict[str, str] | None = None) -> Answer:
    """Ask; an error is an answer too."""
    sent, begin = time.time(), time.perf_counter()
    try:
        with client.stream(
            "GET", url + path, timeout=TIMEOUT_SECONDS, headers=headers or {}
        ) as response:
            body = b""
            for part in response.iter_bytes():
                body += part
                if len(body) > _MOST_BYTES or time.perf_counter() - begin > 2 * TIMEOUT_SECONDS:
                    break
            kept = {
                name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers
            }
            took = time.perf_counter() - begin
            text = body.decode(errors="replace")
            return Answer(path, response.status_code, "", kept, text, sent, took)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        took = time.perf_counter() - begin
        return Answer(path, None, _reason(error), {}, "", sent, took)


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"none within {TIMEOUT_SECONDS:g} s"
    text = str(error) or type(error).__name__
    return "connection refused" if "refused" in text else text


def parse_answer(capture: Capture) -> Answer | None:
    """None when the capture is not one of :meth:`Answer.text`."""
    match = _HEAD.match(capture.text)
    if not match:
        return None
    path, sent, took, rest = match.groups()
    try:
        when, seconds = float(sent), float(took)
    except ValueError:
        return None
    if rest.startswith("# no answer: "):
        return Answer(path, None, rest[len("# no answer: ") :].strip(), {}, "", when, seconds)
    head, _, body = rest.partition("\n\n")
    status, *lines = head.split("\n")
    number = re.match(r"HTTP/1\.1 (\d{3})", status)
    pairs = (line.partition(": ") for line in lines)
    headers = {name.lower(): value for name, _, value in pairs if value}
    return Answer(path, int(number[1]) if number else None, "", headers, body, when, seconds)
