"""A trace as a tree, and as lines of a terminal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pd_connector import telemetry as t
from pdctl.observe.spans import Span

_NARROWEST_BAR = 12
_TOLD = (
    (t.TURN_NUMBER.name, "turn {}"),
    (t.CONVERSATION.name, "of conversation {}"),
    (t.OUTCOME.name, "{}"),
    (t.ROUTE.name, "by {}"),
    (t.TTFT_MS.name, "first token after {:.0f} ms"),
    (t.DIRECTION.name, "{}"),
    (t.TOKENS_PROMPT.name, "{} prompt tokens"),
    (t.TOKENS_READ.name, "{} read"),
    (t.TOKENS_COMPUTED.name, "{} computed"),
    (t.DESCRIPTOR_COUNT.name, "{} descriptors"),
    (t.HANDLE_AGE.name, "handle {:.1f} s old"),
    (t.BACKEND.name, "over {}"),
    ("gen_ai.usage.prompt_tokens", "{} prompt tokens"),
    ("gen_ai.usage.completion_tokens", "{} generated"),
)
"""Attributes worth a word beside the bar, and how they are told."""


@dataclass(frozen=True)
class Node:
    """A span in its tree. ``lost``: its parent is not in the trace."""

    span: Span
    depth: int
    lost: bool


def tree(spans: Iterable[Span]) -> list[Node]:
    """Parents before children, siblings by start; spans whose parent is missing come last."""
    spans = sorted({span.id: span for span in spans}.values(), key=lambda span: span.start)
    ids = {span.id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in spans:
        children.setdefault(span.parent if span.parent in ids else "", []).append(span)

    def below(parent: str, depth: int) -> Iterator[Node]:
        for span in children.get(parent, ()):
            yield from branch(span, depth)

    def branch(span: Span, depth: int) -> Iterator[Node]:
        # The turn itself may have the client's span as its parent.
        lost = depth == 0 and bool(span.parent) and span.name != t.SPAN_TURN.name
        yield Node(span, depth, lost)
        yield from below(span.id, depth + 1)

    branches = [list(branch(span, 0)) for span in children.get("", ())]
    branches.sort(key=lambda nodes: nodes[0].lost)
    return [node for nodes in branches for node in nodes]


def lines(spans: list[Span], width: int) -> Iterator[str]:
    """The waterfall, ``width`` columns wide where that is enough."""
    nodes = tree(spans)
    start = min(span.start for span in spans)
    end = max(span.end for span in spans)
    began = datetime.fromtimestamp(start // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    took = f"{(end - start) / 1e6:.1f} ms"
    yield f"trace {spans[0].trace}  {began}  {took}  {len(nodes)} spans"
    names = max(len(node.span.name) + 2 * node.depth for node in nodes)
    services = max(len(node.span.service) for node in nodes)
    yield f"{'span':<{names}}  {'process':<{services}}  {'start':>8} {'took':>8}"
    bar = max(width - names - services - 26, _NARROWEST_BAR)
    for node in nodes:
        span = node.span
        name = f"{'  ' * node.depth}{span.name}"
        yield (
            f"{name:<{names}}  {span.service:<{services}}  "
            f"{(span.start - start) / 1e6:>8.1f} {span.milliseconds:>8.1f} ms  "
            f"{_bar(span, start, end, bar)}"
        ).rstrip()
        note = _note(node)
        if note:
            yield f"{'  ' * (node.depth + 1)}{note}"


def rows(spans: list[Span]) -> list[dict[str, Any]]:
    """The same for programs; times in milliseconds from the trace's start."""
    start = min(span.start for span in spans)
    return [
        {
            "trace_id": node.span.trace,
            "span_id": node.span.id,
            "parent_id": node.span.parent or None,
            "parent_missing": node.lost,
            "name": node.span.name,
            "service": node.span.service,
            "depth": node.depth,
            "start_ms": (node.span.start - start) / 1e6,
            "duration_ms": node.span.milliseconds,
            "error": node.span.error or None,
            "attributes": node.span.attributes,
            "events": [
                {"name": event.name, "at_ms": (event.at - start) / 1e6}
                for event in node.span.events
            ],
        }
        for node in tree(spans)
    ]


def _bar(span: Span, start: int, end: int, width: int) -> str:
    whole = max(end - start, 1)
    first = (span.start - start) * width // whole
    cells = max(1, round((span.end - span.start) * width / whole))
    return " " * min(first, width - 1) + "█" * min(cells, width - min(first, width - 1))


def _note(node: Node) -> str:
    attributes = node.span.attributes
    words = [
        form.format(attributes[key]) + _why(attributes, key)
        for key, form in _TOLD
        if key in attributes
    ]
    size = attributes.get(t.BYTES.name)
    if isinstance(size, int):
        words.append(_bytes(size))
        seconds = node.span.milliseconds / 1000
        if seconds > 0:
            words.append(f"{size / seconds / 1e9:.2f} GB/s")
    words += [f'"{event.name}"' for event in node.span.events]
    if node.span.error:
        words.append(f"error: {node.span.error}")
    if node.lost:
        words.append("(its parent is not in the trace)")
    return ", ".join(words)


def _why(attributes: dict[str, Any], key: str) -> str:
    """The reason of an outcome or route, where it says more than they do."""
    reasons = {t.OUTCOME.name: t.OUTCOME_REASON.name, t.ROUTE.name: t.ROUTE_REASON.name}
    reason = attributes.get(reasons.get(key, ""))
    known = [None, attributes.get(t.OUTCOME.name)]
    if key == t.ROUTE.name:
        known.append(attributes.get(t.OUTCOME_REASON.name))
    return "" if reason in known else f" ({reason})"


def _bytes(size: int) -> str:
    if size < 1000:
        return f"{size} B"
    for unit, factor in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if size < factor * 1000 or unit == "GB":
            return f"{size / factor:.1f} {unit}"
    raise AssertionError
