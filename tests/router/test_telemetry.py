"""What the router tells of a turn: spans over OTLP, and exemplars that lead to them."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from router_rig import Chat, Router, StartRouter, wait_for
from tests.observe.otlp_receiver import OtlpReceiver
from tests.ports import free_ports

from pd_connector import telemetry

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver(*free_ports(2))
    yield receiver
    receiver.close()


def turns(receiver: OtlpReceiver) -> list[Any]:
    return [span for span in receiver.spans() if span.name == telemetry.SPAN_TURN.name]


def attributes(span: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_turn_is_one_trace(
    start_router: StartRouter, receiver: OtlpReceiver, protocol: str
) -> None:
    endpoint = receiver.grpc_url if protocol == "grpc" else receiver.http_url
    router = start_router(otlp_endpoint=endpoint, otlp_protocol=protocol)
    chat = Chat(router, "c1")
    chat.say("Hello")
    chat.say("Again")
    wait_for(lambda: len(turns(receiver)) == 2, "two turns")
    assert receiver.protocols() == {protocol.partition("/")[0]}
    turn = turns(receiver)[-1]
    names = receiver.span_names(turn.trace_id.hex())
    assert sorted(names) == sorted(
        span.name
        for span in telemetry.SPANS
        if span not in (telemetry.SPAN_DECISION, telemetry.SPAN_TRANSFER)
    )
    told = attributes(turn)
    assert told[telemetry.OUTCOME.name] == "hit"
    assert told[telemetry.GEN_AI_OPERATION.name] == "chat"
    assert told[telemetry.GEN_AI_MODEL.name] == chat.body("x")["model"]
    assert told[telemetry.GEN_AI_INPUT_TOKENS.name] == told[telemetry.TOKENS_PROMPT.name]
    assert telemetry.GEN_AI_CONVERSATION.name not in told
    assert set(told) <= {attribute.name for attribute in telemetry.SPAN_TURN.attributes}


def test_a_conversation_s_id_only_where_it_is_asked_for(
    start_router: StartRouter, receiver: OtlpReceiver
) -> None:
    router = start_router(otlp_endpoint=receiver.grpc_url, trace_conversation_ids=True)
    Chat(router, "c1").say("Hello")
    wait_for(lambda: turns(receiver), "a turn")
    assert attributes(turns(receiver)[0])[telemetry.GEN_AI_CONVERSATION.name] == "c1"


def test_a_late_turn_tells_how_late(start_router: StartRouter, receiver: OtlpReceiver) -> None:
    router = start_router(otlp_endpoint=receiver.grpc_url, handle_ttl=0.5)
    chat = Chat(router, "c1")
    chat.say("Hello")
    wait_for(lambda: router.metric("pd_router_handles_held") == 0, "the handle is too old")
    assert chat.say("Again").outcome == "expired"

    def claims() -> list[Any]:
        return [each for each in receiver.spans() if each.name == telemetry.SPAN_CLAIM.name]

    wait_for(lambda: len(claims()) == 2, "both are told")
    ages = [attributes(each).get(telemetry.HANDLE_AGE.name) for each in claims()]
    assert ages[0] is None
    assert ages[1] >= 0.5


def exemplars(router: Router) -> dict[str, set[str]]:
    """Trace ids of exemplars by metric."""
    answer = router.http.get(f"{router.url}/metrics", headers={"Accept": OPENMETRICS})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    return {
        family.name: found
        for family in text_string_to_metric_families(answer.text)
        if (
            found := {
                sample.exemplar.labels[telemetry.EXEMPLAR_TRACE_ID]
                for sample in family.samples
                if sample.exemplar
            }
        )
    }


def test_exemplars_lead_to_traces(start_router: StartRouter, receiver: OtlpReceiver) -> None:
    router = start_router(otlp_endpoint=receiver.grpc_url)
    Chat(router, "c1").say("Hello")
    wait_for(lambda: turns(receiver), "a turn")
    ids = {turn.trace_id.hex() for turn in turns(receiver)}
    found = exemplars(router)
    assert found == {telemetry.ROUTER_TTFT.name: ids, telemetry.ROUTER_PREFILL.name: ids}


def test_no_exemplars_without_traces(router: Router, conversation: str) -> None:
    Chat(router, conversation).say("Hello")
    assert exemplars(router) == {}
    assert router.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


GROWS = {telemetry.ROUTER_REQUESTS.name}
"""Counters whose labels nobody can list: paths and statuses."""


def counted(router: Router) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by series, of every counter."""
    families = text_string_to_metric_families(
        router.http.get(f"{router.url}/metrics", headers={"Accept": OPENMETRICS}).text
    )
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if family.type == "counter" and sample.name.endswith("_total") and sample.name not in GROWS
    }


def test_a_counter_s_first_event_is_an_increase(start_router: StartRouter) -> None:
    """rate() sees no increase in a series that begins with its first event."""
    router = start_router(pair_pause=0.001)
    before = counted(router)
    chat = Chat(router, "c1")
    outcomes = [chat.say("Hello").outcome, chat.say("Again").outcome]
    for fault in (500, "drop"):
        router.prefill[0].faults.append(fault)
        outcomes += [chat.say("With a fault").outcome]
    chat.messages[0]["content"] = "something else"
    outcomes.append(chat.say("Edited").outcome)
    Chat(router, None).say("Alone", n=2)
    assert outcomes == ["miss", "hit", "failed", "failed", "history_changed"]
    after = counted(router)
    assert {
        telemetry.ROUTER_TURNS.name,
        telemetry.ROUTER_ROUTES.name,
        telemetry.ROUTER_HANDLES_REFUSED.name,
        telemetry.ROUTER_PREFILL_RETRIES.name,
        telemetry.ROUTER_ENDINGS.name,
    } <= {series[0] for series, value in after.items() if value != before.get(series, 0)}
    assert after.keys() == before.keys()
