"""The real router between fake engines, watched by a real Prometheus."""

import itertools
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from pd_connector import telemetry
from pdctl.observe.boards import BOARDS
from pdctl.observe.check import Found, Row, check_boards, selectors
from pdctl.observe.panel import Scope
from pdctl.observe.prometheus import Prometheus
from tests.cli import pdctl
from tests.observe.conftest import quick_spec
from tests.observe.exemplars import bucket_traces
from tests.observe.otlp_receiver import OtlpReceiver
from tests.ports import free_ports
from tests.programs import program
from tests.waiting import until

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from router_rig import Chat, launch

from tests.fake_engine import FakeEngine

UNTOLD = {telemetry.ROUTER_READBACK.name + "_sum", telemetry.ROUTER_READBACK.name + "_count"}
"""The fake engines tell no time of a read."""


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def of_router(row: Row) -> bool:
    """Whether the router alone feeds a query."""
    names = {name for name, _ in selectors(row.query)}
    return all(name.startswith("pd_router_") for name in names) and not names & UNTOLD


def test_every_query_over_the_router_finds_data(
    no_state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prometheus", "prometheus-alertmanager"):
        program(name)
    receiver = OtlpReceiver(*free_ports(2))
    prefill, decode = FakeEngine("prefill").start(), FakeEngine("decode").start()
    router = launch(tmp_path, [prefill], [decode], otlp_endpoint=receiver.grpc_url)
    path, spec = quick_spec(tmp_path, "routed")
    spec["router"]["port"] = port_of(router.url)
    spec["prefill"]["legs"][0]["port"] = port_of(prefill.url)
    spec["decode"]["legs"][0]["port"] = port_of(decode.url)
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    prometheus = Prometheus(f"http://127.0.0.1:{spec['observability']['stack']['prometheus_port']}")
    outcomes: Counter[str] = Counter()
    numbers = itertools.count()

    def shown() -> list[Row]:
        """Conversations come until everything that they feed is there: a turn without a handle,
        one that is read back, one whose history the client has changed."""
        chat = Chat(router, f"c{next(numbers)}")
        for text in ("hello", "more", "again"):
            if text == "again":
                chat.messages[0]["content"] = "something else"
            outcomes[chat.say(text).outcome] += 1
        rows = check_boards(prometheus, BOARDS, Scope("30s", "1m"))
        return [row for row in rows if of_router(row) and row.found is Found.NO_DATA]

    try:
        assert pdctl("observe", "up", path).code == 0
        until("every query over the router finds data", lambda: not shown())
        counted = f"sum by (outcome) ({telemetry.ROUTER_TURNS.name})"
        until(
            "all turns are counted",
            lambda: (
                {
                    series.labels["outcome"]: series.value
                    for series in prometheus.instant(counted)
                    if series.value
                }
                == outcomes
            ),
        )
        until(
            "buckets lead to traces that were received",
            lambda: (found := bucket_traces(prometheus)) and found <= receiver.traces(),
        )
        up = prometheus.instant(telemetry.ROUTER_LEG_UP.name)
        assert {series.labels["leg"]: series.labels["role"] for series in up} == {
            "prefill-0": "prefill",
            "decode-0": "decode",
        }
    finally:
        assert pdctl("observe", "down", "routed").code == 0
        router.stop()
        prefill.stop()
        decode.stop()
        receiver.close()
