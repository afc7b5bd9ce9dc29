"""Spans out of an OTLP file or a Tempo.

The file is what the Collector's file exporter writes: one JSON object a line, OTLP's JSON encoding
(ids in hex). Tempo's ``/api/traces/ID`` gives the same in protobuf's JSON (ids in base64, and
``batches`` for ``resourceSpans``).
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pd_connector import telemetry
from pdctl.errors import PdctlError

_ERROR_CODES = (2, "STATUS_CODE_ERROR")
_WHO = (telemetry.RESOURCE_LEG.name, "service.instance.id", "service.name")
"""Attributes of a resource that tell whose spans it has, the best first."""
_SEARCHED = 200
"""Traces that Tempo is asked for when one is to be found."""


@dataclass(frozen=True)
class Event:
    """``at`` is Unix time in nanoseconds."""

    name: str
    at: int


@dataclass(frozen=True)
class Span:
    """``start`` and ``end`` are Unix time in nanoseconds; ids are hex, an empty parent is none."""

    trace: str
    id: str
    parent: str
    name: str
    service: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: tuple[Event, ...]
    error: str

    @property
    def milliseconds(self) -> float:
        return (self.end - self.start) / 1e6


def read_file(path: Path) -> list[Span]:
    """All spans of an OTLP file.

    Raises:
        PdctlError: it cannot be read, or a line is no OTLP JSON. A cut last line is left out:
            the Collector may be writing it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PdctlError(f"{path}: {getattr(error, 'strerror', None) or error}", 2) from None
    spans: list[Span] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            spans += _spans(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines) and spans:
                break
            raise PdctlError(f"{path}:{number}: not JSON; one OTLP object a line", 2) from None
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise PdctlError(f"{path}:{number}: no OTLP spans: {error!r}", 2) from None
    return spans


class Tempo:
    """One Tempo. Methods raise PdctlError when it cannot be asked."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            timeout=30.0, trust_env=False, headers={"Accept": "application/json"}
        )

    def trace(self, trace: str) -> list[Span]:
        """Its spans; none when Tempo does not have it."""
        body = self._get(f"/api/traces/{trace}", {})
        try:
            return list(_spans(body)) if body else []
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise PdctlError(f"{self.url}: no trace in its answer: {error!r}") from None

    def find(self, outcome: str | None, slowest: bool) -> str | None:
        """Id of the latest turn, or of the slowest among the latest, with this outcome."""
        conditions = [f'name = "{telemetry.SPAN_TURN.name}"']
        if outcome:
            conditions.append(f'span.{telemetry.OUTCOME.name} = "{outcome}"')
        query = f"{{ {' && '.join(conditions)} }}"
        body = self._get("/api/search", {"q": query, "limit": str(_SEARCHED)}) or {}
        found = body.get("traces", [])
        if not found:
            return None
        key = "durationMs" if slowest else "startTimeUnixNano"
        return str(max(found, key=lambda each: int(each.get(key, 0)))["traceID"])

    def _get(self, path: str, asked: dict[str, str]) -> dict[str, Any] | None:
        try:
            answer = self._client.get(f"{self.url}{path}", params=asked)
            if answer.status_code == 404:
                return None
            if answer.status_code != 200:
                raise PdctlError(
                    f"{self.url}{path} answers {answer.status_code}: {answer.text[:200].strip()}"
                )
            body = answer.json()
        except httpx.ConnectError as error:
            raise PdctlError(
                f"{self.url}: {error}; --tempo says where Tempo is, --file reads what the "
                "Collector's file exporter wrote"
            ) from None
        except httpx.HTTPError as error:
            raise PdctlError(f"{self.url}: {error or type(error).__name__}") from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise PdctlError(f"{self.url} is not a URL: {error}", 2) from None
        except ValueError:
            raise PdctlError(f"{self.url}{path}: no JSON: is that a Tempo?") from None
        return body if isinstance(body, dict) else None


def choose(spans: Iterable[Span], outcome: str | None, slowest: bool) -> str | None:
    """Trace id of the latest turn, or of the slowest, with this outcome (None: any)."""
    turns = [
        span
        for span in spans
        if span.name == telemetry.SPAN_TURN.name
        and outcome in (None, span.attributes.get(telemetry.OUTCOME.name))
    ]
    if not turns:
        return None
    return max(turns, key=lambda span: span.end - span.start if slowest else span.start).trace


def _spans(body: dict[str, Any]) -> Iterator[Span]:
    body = body.get("trace", body)
    for resource in body.get("resourceSpans") or body.get("batches") or ():
        about = _attributes(resource.get("resource", {}).get("attributes", ()))
        service = next((str(about[key]) for key in _WHO if about.get(key)), "?")
        for scope in resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans", ()):
            for span in scope.get("spans", ()):
                yield _span(span, service)


def _span(span: dict[str, Any], service: str) -> Span:
    status = span.get("status", {})
    failed = status.get("code") in _ERROR_CODES
    return Span(
        trace=_id(span["traceId"]),
        id=_id(span["spanId"]),
        parent=_id(span.get("parentSpanId", "")),
        name=span["name"],
        service=service,
        start=int(span["startTimeUnixNano"]),
        end=int(span["endTimeUnixNano"]),
        attributes=_attributes(span.get("attributes", ())),
        events=tuple(
            Event(event.get("name", ""), int(event.get("timeUnixNano", 0)))
            for event in span.get("events", ())
        ),
        error=(status.get("message") or "error") if failed else "",
    )


def _id(text: str) -> str:
    """Hex, also of base64; a parent of zeros is none."""
    if not re.fullmatch(r"(?:[0-9a-fA-F]{16}){0,2}", text):
        try:
            text = base64.b64decode(text, validate=True).hex()
        except (binascii.Error, ValueError):
            raise ValueError(f"{text!r} is no id") from None
    return "" if not text.strip("0") else text.lower()


def _attributes(pairs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in pairs}


def _value(value: dict[str, Any]) -> Any:
    """A typed OTLP value; 64-bit integers are text in JSON."""
    for kind, inner in value.items():
        if kind == "intValue":
            return int(inner)
        if kind == "arrayValue":
            return [_value(each) for each in inner.get("values", ())]
        if kind == "kvlistValue":
            return _attributes(inner.get("values", ()))
        return inner
    return None
