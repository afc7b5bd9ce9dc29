"""OTLP JSON lines such as the Collector's file exporter writes, and Tempo's answer of the same."""

import base64
import json
from typing import Any

HIT = "0af7651916cd43dd8448eb211c80319c"
EXPIRED = "1bf7651916cd43dd8448eb211c80319c"
START = 1_700_000_000_000_000_000


def span(
    trace: str, number: int, parent: int, name: str, start_ms: float, ms: float, **more: Any
) -> dict[str, Any]:
    attributes = more.pop("attributes", {})
    return {
        "traceId": trace,
        "spanId": f"{number:016x}",
        "parentSpanId": f"{parent:016x}" if parent else "",
        "name": name,
        "startTimeUnixNano": str(START + int(start_ms * 1e6)),
        "endTimeUnixNano": str(START + int((start_ms + ms) * 1e6)),
        "attributes": [{"key": key, "value": value(each)} for key, each in attributes.items()],
        **more,
    }


def value(each: Any) -> dict[str, Any]:
    if isinstance(each, int):
        return {"intValue": str(each)}
    if isinstance(each, float):
        return {"doubleValue": each}
    return {"stringValue": each}


def resource(service: str, *spans: dict[str, Any]) -> dict[str, Any]:
    return {
        "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]},
        "scopeSpans": [{"scope": {"name": "s"}, "spans": list(spans)}],
    }


def hit_turn(trace: str = HIT, client: int = 0) -> list[dict[str, Any]]:
    """Router, prefill and decode: the children arrive before the turn, as they do."""
    return [
        resource(
            "prefill-0",
            span(
                trace,
                5,
                3,
                "pd.decision",
                12,
                300,
                attributes={"pd.outcome": "hit", "pd.tokens.read": 3050, "pd.tokens.computed": 622},
            ),
            span(
                trace,
                6,
                3,
                "pd.transfer",
                20,
                10,
                attributes={"pd.direction": "d2p", "pd.bytes": 6_000_000, "pd.descriptors": 64},
            ),
            span(trace, 7, 3, "llm_request", 12, 310),
        ),
        resource(
            "decode-0",
            span(
                trace,
                8,
                4,
                "pd.transfer",
                345,
                12,
                attributes={"pd.direction": "p2d", "pd.bytes": 7_000_000},
            ),
            span(trace, 9, 4, "llm_request", 340, 640),
        ),
        resource(
            "router-0",
            span(trace, 2, 1, "pd.claim", 1, 2, attributes={"pd.handle_age_s": 3.25}),
            span(trace, 3, 1, "pd.prefill", 10, 320),
            span(trace, 4, 1, "pd.decode", 335, 660),
            span(
                trace,
                1,
                client,
                "pd.turn",
                0,
                1000,
                attributes={"pd.outcome": "hit", "pd.route": "readback", "pd.tokens.prompt": 3672},
            ),
        ),
    ]


def expired_turn() -> list[dict[str, Any]]:
    """Its parts of prefill got lost, but for one orphan."""
    return [
        resource(
            "router-0",
            span(
                EXPIRED,
                1,
                0,
                "pd.turn",
                2000,
                3000,
                attributes={"pd.outcome": "expired", "pd.outcome_reason": "blocks gone"},
                status={"code": 2, "message": "HTTP 500"},
            ),
        ),
        resource(
            "prefill-0",
            span(
                EXPIRED,
                5,
                3,
                "pd.decision",
                2010,
                2500,
                attributes={"pd.outcome": "expired"},
                events=[
                    {
                        "name": "Declining expired remote read",
                        "timeUnixNano": str(START + 2_020_000_000),
                    }
                ],
            ),
        ),
    ]


def lines() -> str:
    """A file of both turns, one export a line."""
    return "".join(
        json.dumps({"resourceSpans": [each]}) + "\n" for each in [*hit_turn(), *expired_turn()]
    )


def as_tempo(resources: list[dict[str, Any]]) -> dict[str, Any]:
    """What /api/traces/ID answers: batches, ids in base64."""
    told = json.loads(json.dumps(resources))
    for each in told:
        for scope in each["scopeSpans"]:
            for one in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    one[key] = base64.b64encode(bytes.fromhex(one[key])).decode()
    return {"batches": told}
