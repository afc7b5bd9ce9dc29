"""A real Prometheus that scrapes a fake deployment under load."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_connector.contract import Outcome
from pdctl.observe.prometheus import Prometheus
from tests.cli import pdctl
from tests.observe.fake_grafana import EDITOR, FakeGrafana
from tests.observe.fake_legs import FakeDeployment
from tests.ports import free_ports
from tests.programs import program
from tests.waiting import until

REFERENCE = Path(__file__).parents[2] / "examples/laptop.yaml"


@pytest.fixture
def no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv("PDCTL_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGrafana]:
    """A fake Grafana, and its editor's token in the environment."""
    monkeypatch.setenv("GRAFANA_TOKEN", EDITOR)
    fake = FakeGrafana(free_ports(1)[0])
    yield fake
    fake.close()


@dataclass(frozen=True)
class Watched:
    """What runs: its spec file, the Prometheus that scrapes it, and the fake legs."""

    spec: Path
    name: str
    prometheus: Prometheus
    legs: FakeDeployment


def quick_spec(folder: Path, name: str, **stack: Any) -> tuple[Path, dict[str, Any]]:
    """The reference spec with free ports, one look a second and short windows."""
    spec = yaml.safe_load(REFERENCE.read_text())
    ports = free_ports(6)
    spec["name"] = name
    spec["router"]["port"] = ports[0]
    spec["prefill"]["legs"][0]["port"] = ports[1]
    spec["decode"]["legs"][0]["port"] = ports[2]
    spec["kv_transfer"]["backend"] = "LIBFABRIC"
    spec["fabric"]["provider"] = "tcp"
    spec["observability"]["stack"] |= {
        "prometheus_port": ports[3],
        "alertmanager_port": ports[4],
        "grafana_port": ports[5],
        "scrape_interval": "1s",
        "alert_window": "10s",
        **stack,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path, spec


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Under load until there is enough for rates."""
    for name in ("prometheus", "prometheus-alertmanager"):
        program(name)
    folder = tmp_path_factory.mktemp("watched")
    path, spec = quick_spec(folder, "watched")
    legs = FakeDeployment(
        spec["router"]["port"],
        spec["prefill"]["legs"][0]["port"],
        spec["decode"]["legs"][0]["port"],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCTL_STATE_DIR", str(folder / "state"))
        started = pdctl("observe", "up", path)
        assert started.code == 0, started.err
        prometheus = Prometheus(
            f"http://127.0.0.1:{spec['observability']['stack']['prometheus_port']}"
        )
        stop = under_load(legs)
        try:
            until(
                "eight looks at every leg",
                lambda: (
                    len(found := prometheus.instant("count_over_time(up[1m]) >= 8")) == 3
                    and all(series.value >= 8 for series in found)
                ),
            )
            yield Watched(path, "watched", prometheus, legs)
        finally:
            stop()
            ended = pdctl("observe", "down", "watched")
            legs.close()
            assert ended.code == 0, ended.err


def under_load(legs: FakeDeployment) -> Callable[[], None]:
    """Turns until the returned function is called."""
    ended = threading.Event()

    def turns() -> None:
        number = 0
        while not ended.wait(0.1):
            number = number % 6 + 1
            tokens = 1000 * 2**number
            outcome = Outcome.MISS if number in (1, 4) else Outcome.HIT
            legs.turn(number, tokens, outcome)
            legs.turn(number, tokens, Outcome.HIT if number > 1 else Outcome.MISS)

    thread = threading.Thread(target=turns)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join()

    return stop


def answer(text: str) -> Any:
    return json.loads(text)
