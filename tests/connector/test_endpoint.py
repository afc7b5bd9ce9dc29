"""The lease endpoint's HTTP: who may use it, what it takes, what it says."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pd_connector import endpoint
from pd_connector.contract import ENGINE_LEASES_PATH, LEASE_KEY_HEADER, SECRET_FILE_VARIABLE
from pd_connector.control import Answers, make_own_key, order_key, question
from pd_connector.http import EngineRoutes
from pd_connector.leases import Leases
from pd_connector.secret import lease_key

SECRET = b"s" * 64
RANKS = [("127.0.0.1", 1), ("127.0.0.1", 2)]


class Engine:
    """Two data-parallel ranks whose side channels answer without a wire."""

    def __init__(self) -> None:
        self.tables = [Leases(), Leases()]
        for number, table in enumerate(self.tables):
            table.pin(f"turn-{number}", [1, 2], 256, table.clock() + 100)
        self.down = False
        self.key: str | None = None

    def ask(self, host: str, port: int, body: Any, seconds: float) -> dict[str, Any]:
        if self.down:
            raise OSError("no answer")
        table = self.tables[port - 1]
        state = {"pins": 1, "pinned_blocks": 2, "blocks": 64, "high_water": 0.8}
        return dict(Answers(table, self.key, lambda: state)._answer(body))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Engine:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(secret))
    engine = Engine()
    engine.key = order_key()
    monkeypatch.setattr(endpoint, "ask", engine.ask)
    monkeypatch.setattr(endpoint, "side_channels", lambda config: RANKS)
    return engine


def client(address: str = "10.0.0.9") -> TestClient:
    app = FastAPI()
    plugin = EngineRoutes()
    plugin.attach_router(app)
    plugin._engine = SimpleNamespace()
    return TestClient(app, client=(address, 5))


KEY = {LEASE_KEY_HEADER: lease_key(SECRET)}


def test_the_kept_turns_of_all_ranks_are_listed(engine: Engine) -> None:
    answer = client().get(ENGINE_LEASES_PATH, headers=KEY)
    assert answer.status_code == 200
    body = answer.json()
    assert [turn["id"] for turn in body["turns"]] == ["turn-0", "turn-1"]
    assert body["pins"] == 2 and body["blocks"] == 128 and body["high_water"] == 0.8


def test_turns_are_freed_and_renewed_whichever_rank_keeps_them(engine: Engine) -> None:
    order = {"release": ["turn-1", "x"], "renew": {"turn-0": 900, "y": 1}}
    body = client().post(ENGINE_LEASES_PATH, headers=KEY, json=order).json()
    assert body["released"] == ["turn-1"]
    assert body["renewed"]["turn-0"] == pytest.approx(900, abs=1)
    assert sorted(body["unknown"]) == ["x", "y"]


def test_many_turns_go_in_several_messages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def ask(host: str, port: int, body: Any, seconds: float) -> dict[str, Any]:
        sent.append(len(question(body)))
        return engine.ask(host, port, body, seconds)

    monkeypatch.setattr(endpoint, "ask", ask)
    monkeypatch.setattr(endpoint, "LARGEST_PIECE", 40_000)
    many = [f"chatcmpl-{number:032x}" for number in range(2000)]
    order = {"release": [*many, "turn-1"], "renew": {"turn-0": 900}}
    body = client().post(ENGINE_LEASES_PATH, headers=KEY, json=order).json()
    assert body["released"] == ["turn-1"] and list(body["renewed"]) == ["turn-0"]
    assert len(body["unknown"]) == 2000
    assert body["pins"] == 2
    assert max(sent) < 65536
    too_many = client().post(ENGINE_LEASES_PATH, headers=KEY, json={"release": many * 6})
    assert too_many.status_code == 413


@pytest.mark.parametrize("headers", [{}, {LEASE_KEY_HEADER: "wrong"}, {LEASE_KEY_HEADER: "\xe9"}])
@pytest.mark.parametrize("address", ["10.0.0.9", "127.0.0.1"])
def test_with_a_secret_only_its_key_opens(
    engine: Engine, headers: dict[str, str], address: str
) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for answer in (
        client(address).get(ENGINE_LEASES_PATH, headers=encoded),
        client(address).post(ENGINE_LEASES_PATH, headers=encoded, json={"release": ["turn-0"]}),
    ):
        assert answer.status_code == 401
        assert LEASE_KEY_HEADER in answer.json()["error"]
    assert engine.tables[0].held()[0] == 1


def test_without_a_secret_only_loopback_may(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_FILE_VARIABLE)
    monkeypatch.setenv("PD_OWN_LEASE_KEY", "placeholder")
    monkeypatch.delenv("PD_OWN_LEASE_KEY")
    make_own_key()
    engine.key = order_key()
    assert client().get(ENGINE_LEASES_PATH, headers=KEY).status_code == 403
    assert client("unix").get(ENGINE_LEASES_PATH).status_code == 403
    for address in ("127.0.0.1", "::1"):
        assert client(address).get(ENGINE_LEASES_PATH).status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "must be a JSON object"),
        ({"release": "turn-0"}, "release must be a list"),
        ({"release": [1]}, "release must be a list"),
        ({"renew": ["turn-0"]}, "renew must be"),
        ({"renew": {"turn-0": 0}}, "renew must be"),
        ({"renew": {"turn-0": True}}, "renew must be"),
        ({"renew": {"turn-0": "9"}}, "renew must be"),
        ({"release": ["x" * 1025]}, "at most 1024 characters"),
        ({"extend": {}}, "unknown key 'extend'"),
    ],
)
def test_what_is_no_order_is_refused(engine: Engine, body: Any, says: str) -> None:
    answer = client().post(ENGINE_LEASES_PATH, headers=KEY, json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]


def test_a_body_that_is_no_json_is_refused(engine: Engine) -> None:
    assert client().post(ENGINE_LEASES_PATH, headers=KEY, content=b"{").status_code == 400


def test_an_engine_that_does_not_answer_is_told(engine: Engine) -> None:
    engine.down = True
    answer = client().post(ENGINE_LEASES_PATH, headers=KEY, json={"release": ["turn-0"]})
    assert answer.status_code == 503


def test_ranks_with_another_key_are_told(engine: Engine) -> None:
    engine.key = "other"
    answer = client().get(ENGINE_LEASES_PATH, headers=KEY)
    assert answer.status_code == 503
    assert "wrong key" in answer.json()["error"]
