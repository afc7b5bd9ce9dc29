"""Spans leave the engine beside its loop, and what cannot leave is counted."""

import random
import threading
from collections.abc import Iterator, Sequence

import pytest

from pd_connector import telemetry
from pd_connector.tracing import Record, Spans, now, otlp_export
from tests.otlp import Receiver
from tests.waiting import until

TRACE, PARENT = "ab" * 16, "cd" * 8
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")


def add(spans: Spans, headers: dict[str, str] | None = HEADERS, event: str | None = None) -> None:
    start = now()
    attributes = {telemetry.OUTCOME: "expired", telemetry.TOKENS_READ: 3}
    spans.add(telemetry.SPAN_DECISION, headers, start, start + 5_000_000, attributes, event)


def test_a_span_is_a_child_of_the_requests_span(receiver: Receiver, http: None) -> None:
    lost: list[int] = []
    spans = Spans(otlp_export(receiver.endpoint, "decode-0"), lost.append)
    add(spans, event=telemetry.EVENT_DECLINED)
    spans.close()
    (span,) = receiver.of("pd.decision", TRACE)
    assert span.parent_id == PARENT
    assert span.attributes == {"pd.outcome": "expired", "pd.tokens.read": 3}
    assert span.events == (telemetry.EVENT_DECLINED,)
    assert span.seconds == pytest.approx(0.005)
    assert lost == []


def test_ids_differ_where_random_numbers_are_seeded_alike(receiver: Receiver, http: None) -> None:
    spans = [Spans(otlp_export(receiver.endpoint, "x"), lambda lost: None) for _ in range(2)]
    for each in spans:
        random.seed(0)
        add(each)
        each.close()
    first, second = receiver.of("pd.decision", TRACE)
    assert first.span_id != second.span_id


def test_a_parent_that_is_not_sampled_has_no_children(receiver: Receiver, http: None) -> None:
    lost: list[int] = []
    spans = Spans(otlp_export(receiver.endpoint, "x"), lost.append)
    add(spans, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    spans.close()
    assert receiver.spans == [] and lost == []


def test_without_tracing_nothing_runs() -> None:
    before = threading.active_count()
    spans = Spans(None, lambda lost: None)
    add(spans)
    assert threading.active_count() == before
    spans.close()


def test_a_request_without_a_trace_has_no_span(receiver: Receiver, http: None) -> None:
    spans = Spans(otlp_export(receiver.endpoint, "x"), lambda lost: None)
    add(spans, None)
    spans.close()
    assert receiver.spans == []


def test_a_full_queue_drops_and_counts() -> None:
    sending, go = threading.Event(), threading.Event()
    sent: list[Record] = []
    lost: list[int] = []

    def slow(records: Sequence[Record]) -> int:
        sending.set()
        go.wait(30)
        sent.extend(records)
        return 0

    spans = Spans(slow, lost.append, most=3, interval=0.01)
    add(spans)
    assert sending.wait(30)
    for _ in range(5):
        add(spans)
    go.set()
    spans.close(30)
    assert len(sent) == 4
    assert sum(lost) == 2


def test_spans_that_a_receiver_refuses_are_counted(receiver: Receiver, http: None) -> None:
    receiver.status = 400
    lost: list[int] = []
    spans = Spans(otlp_export(receiver.endpoint, "x"), lost.append)
    add(spans)
    until("the loss is counted", lambda: sum(lost) == 1)
    spans.close()


def test_an_export_that_fails_does_not_end_the_thread() -> None:
    lost: list[int] = []

    def broken(records: Sequence[Record]) -> int:
        raise RuntimeError("no")

    spans = Spans(broken, lost.append, interval=0.01)
    for expected in (1, 2):
        add(spans)
        until("the loss is counted", lambda expected=expected: sum(lost) == expected)
    spans.close()


def test_a_protocol_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ValueError, match="smoke"):
        otlp_export("http://127.0.0.1:1", "x")
