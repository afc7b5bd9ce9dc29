"""Captured HTTP traffic, told apart by content: bodies may be cut or elided."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.evidence.facts import Capture, Evidence, LegEvidence

_REQUEST_LINE = re.compile(r"\b(?:POST|GET)\s+/\S+")
_ASKS = re.compile(r'"(?:messages|prompt|input)"\s*:')
_ANSWERS = re.compile(r'"(?:choices|usage|object)"\s*:|^HTTP/\d')
_EVENT = re.compile(r"^\s*data:\s*\{", re.MULTILINE)

_TARGET = re.compile(
    r"(?im)^(?:host:\s*|(?:POST|GET)\s+https?://|.{0,40}->\s*)[\w.-]{0,60}?\b(prefill|decode)"
)
_ANSWER_STARTS = re.compile(r"(?m)^(?=HTTP/\d)")

REMOTE_HOST = re.compile(r"""["']?remote_host["']?\s*[:=]\s*["']?([A-Za-z0-9_.:\[\]-]+)""")
HANDLE = re.compile(r'"(?:kv_transfer_params)"\s*:\s*\{[^}]')
LOCAL_ADDRESS = re.compile(r"^\[?(?:localhost|127\.[\d.]+|0\.0\.0\.0|::1?|\*)\]?$")


def requests(evidence: Evidence, *roles: str) -> Iterator[tuple[LegEvidence, Capture]]:
    """Captures that hold a completion request."""
    for leg, capture in _captures(evidence, *roles):
        if _EVENT.search(capture.text):
            continue
        if _ASKS.search(capture.text) and not _ANSWERS.search(capture.text):
            yield leg, capture


def sent_to(evidence: Evidence, role: str) -> Iterator[tuple[LegEvidence, Capture]]:
    """Completion requests that reach a role: captured there, or elsewhere on their way to it."""
    yield from requests(evidence, role)
    for leg, capture in requests(evidence, "router", "client", "deployment"):
        target = _TARGET.search(capture.text)
        if target and target[1].lower() == role:
            yield leg, capture


def request_heads(evidence: Evidence, *roles: str) -> Iterator[tuple[LegEvidence, Capture]]:
    """Captures that show a request's line and headers."""
    for leg, capture in _captures(evidence, *roles):
        if _REQUEST_LINE.search(capture.text):
            yield leg, capture


def answers(evidence: Evidence, *roles: str) -> Iterator[tuple[LegEvidence, Capture]]:
    """Captures that hold an answer that is no stream."""
    for leg, capture in _captures(evidence, *roles):
        if not _EVENT.search(capture.text) and (
            _ANSWERS.search(capture.text)
            or (HANDLE.search(capture.text) and not _ASKS.search(capture.text))
        ):
            yield leg, capture


def streams(evidence: Evidence, *roles: str) -> Iterator[tuple[LegEvidence, Capture]]:
    """Captures that hold a stream of events."""
    for leg, capture in _captures(evidence, *roles):
        if _EVENT.search(capture.text):
            yield leg, capture


def remote_hosts(evidence: Evidence) -> Iterator[tuple[LegEvidence, Capture, str]]:
    """Addresses that handles in captures point to."""
    for leg, capture in _captures(evidence):
        for match in REMOTE_HOST.finditer(capture.text):
            yield leg, capture, match[1]


def _captures(evidence: Evidence, *roles: str) -> Iterator[tuple[LegEvidence, Capture]]:
    for leg in evidence.legs:
        if not roles or leg.role in roles:
            for capture in leg.http:
                for part in _ANSWER_STARTS.split(capture.text):
                    if part.strip():
                        yield leg, Capture(capture.source, part)
