"""A prompt's claim and its READ, as the scheduler side sees them (decode's answers are made up)."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pd_connector import telemetry
from pd_connector.claims import Claims
from pd_connector.contract import PD_LEASE, Outcome
from pd_connector.counters import Pending
from pd_connector.engine import reason_of, refused
from pd_connector.leases import Claim
from pd_connector.readback import Decision
from pd_connector.reads import Reads
from pd_connector.tracing import Record, Spans
from pd_connector.transfers import Transfer
from tests.waiting import until

HEADERS = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}


class Prefill:
    def __init__(self) -> None:
        self.answer = Claim(True, 30.0, "granted")
        self.given_back: list[tuple[str, str]] = []
        self.spans: list[Record] = []
        self.pending = Pending()

        def export(records: Any) -> int:
            self.spans.extend(records)
            return 0

        self.reads = Reads(
            Claims(
                lambda host, port, turn, reader: self.answer,
                lambda host, port, turn, reader: self.given_back.append((turn, reader)),
            ),
            self.pending,
            Spans(export, lambda lost: None, interval=0.01),
            "UCX",
        )

    def claimed(self, request: Any) -> Claim:
        until("an answer", lambda: self.reads.claim(request) is not None)
        claim = self.reads.claim(request)
        assert claim is not None
        return claim

    def rows(self) -> dict[str, list[tuple[Any, float]]]:
        rows: dict[str, list[tuple[Any, float]]] = {}
        for name, labels, amount in self.pending.take():
            rows.setdefault(name, []).append((tuple(labels), amount))
        return rows


@pytest.fixture
def prefill() -> Any:
    prefill = Prefill()
    yield prefill
    prefill.reads.close()


def request(**more: Any) -> Any:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": "laptop-decode-0-0123456789ab",
        "remote_request_id": "turn",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_blocks_expiry_time": 12.0,
        PD_LEASE: {"v": 1},
    }
    return SimpleNamespace(
        request_id="me", kv_transfer_params=params | more, trace_headers=dict(HEADERS)
    )


def test_a_claimed_read_is_limited_by_its_claim_not_by_the_handle(prefill: Prefill) -> None:
    mine = request()
    assert prefill.claimed(mine).granted
    prefill.reads.start(mine)
    assert mine.kv_transfer_params["remote_blocks_expiry_time"] is None
    seconds = prefill.reads.take_seconds()
    assert 20 < seconds["me"] < 29.1
    assert prefill.reads.take_seconds() == {}
    prefill.reads.drop("me")
    assert prefill.given_back == []


def test_a_claim_that_grows_old_is_renewed(prefill: Prefill) -> None:
    mine = request()
    assert prefill.claimed(mine).granted
    prefill.answer = Claim(False, 0.0, "high_water")
    assert prefill.claimed(mine).granted
    pending, _ = prefill.reads._asked["me"]
    pending.asked -= 16
    assert prefill.claimed(mine).reason == "high_water"


def test_a_handle_of_a_decode_that_knows_no_claims_keeps_its_deadline(prefill: Prefill) -> None:
    mine = request(**{PD_LEASE: None})
    prefill.answer = Claim(False, 0.0, "unknown")
    assert prefill.claimed(mine).granted
    prefill.reads.start(mine)
    assert mine.kv_transfer_params["remote_blocks_expiry_time"] == 12.0
    assert prefill.reads.take_seconds() == {}


def test_a_claim_that_is_not_used_is_given_back(prefill: Prefill) -> None:
    prefill.claimed(request())
    prefill.reads.drop("me")
    until("decode has it back", lambda: prefill.given_back == [("turn", "me")])


def test_transfers_are_counted_and_told(prefill: Prefill) -> None:
    mine = request()
    prefill.claimed(mine)
    prefill.reads.start(mine)
    prefill.reads.ended(
        [
            Transfer("me", 1_000, 0.004, 0.001, 600, 8),
            Transfer("me", 1_000, 0.005, 0.001, 400, 8),
            Transfer("me", 1_000, 0.0, 0.0, 0, 0, failed=True),
        ]
    )
    read = prefill.reads.over("me")
    assert read is not None and (read.bytes, read.seconds, read.failures) == (1000, 0.005, 1)
    assert prefill.reads.over("me") is None
    labels = ("d2p", "UCX", "laptop-decode-0")
    rows = prefill.rows()
    assert rows[telemetry.ENGINE_TRANSFER_BYTES.name] == [(labels, 600), (labels, 400)]
    assert rows[telemetry.ENGINE_TRANSFER_SECONDS.name] == [(labels, 0.004), (labels, 0.005)]
    assert rows[telemetry.ENGINE_TRANSFER_FAILURES.name] == [(labels, 0), (labels, 1)]
    until("the spans are sent", lambda: len(prefill.spans) == 2)
    assert [record.ended - record.started for record in prefill.spans] == [4_000_000, 5_000_000]


def test_failures_are_at_0_before_the_first_and_told_once_per_peer(prefill: Prefill) -> None:
    for _ in range(2):
        mine = request()
        prefill.claimed(mine)
        prefill.reads.start(mine)
    labels = ("d2p", "UCX", "laptop-decode-0")
    assert prefill.rows()[telemetry.ENGINE_TRANSFER_FAILURES.name] == [(labels, 0)]


def test_prefills_blocks_go_the_other_way(prefill: Prefill) -> None:
    mine = request(do_remote_prefill=True, do_remote_decode=False)
    mine.trace_headers = None
    prefill.reads.start(mine)
    prefill.reads.ended([Transfer("me", 1_000, 0.004, 0.001, 600, 8)])
    ((labels, _),) = prefill.rows()[telemetry.ENGINE_TRANSFER_BYTES.name]
    assert labels[0] == "p2d"
    assert prefill.spans == []


@pytest.mark.parametrize(
    ("refusal", "outcome"),
    [
        ("expired", Outcome.EXPIRED),
        ("expiring", Outcome.EXPIRED),
        ("released", Outcome.EXPIRED),
        ("high_water", Outcome.EXPIRED),
        ("successor", Outcome.EXPIRED),
        ("unknown", Outcome.EXPIRED),
        ("read", Outcome.FAILED),
        ("claimed", Outcome.FAILED),
        ("unreachable: no answer in time", Outcome.FAILED),
    ],
)
def test_what_decode_refuses_is_not_read(refusal: str, outcome: Outcome) -> None:
    made = refused(Decision(Outcome.HIT, 300, 300), refusal)
    assert (made.outcome, made.tokens, made.releases_handle) == (outcome, 0, False)


def test_only_reads_can_be_refused() -> None:
    for decision in (Decision(Outcome.MISS), Decision(Outcome.HIT, 300, 300)):
        assert refused(decision, "") is decision
    assert refused(Decision(Outcome.LOCAL_HIT), "expired").outcome is Outcome.LOCAL_HIT


def test_the_reason_is_the_closest_one() -> None:
    prompt = SimpleNamespace(refusal="", expired=False, decision=None)
    assert reason_of(prompt) == ""
    prompt.decision = Decision(Outcome.HISTORY_CHANGED, reason="other tokens")
    assert reason_of(prompt) == "other tokens"
    prompt.expired = True
    assert "while it was read" in reason_of(prompt)
    prompt.refusal = "released"
    assert reason_of(prompt) == "released"
