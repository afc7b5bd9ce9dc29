"""Claims over a real side channel, and without one."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from pd_connector import claims as claims_module
from pd_connector.claims import Claims
from pd_connector.control import PREFIX, Answers, ask, claim_of, signed
from pd_connector.leases import Claim, Leases
from pd_connector.secret import lease_key
from tests.ports import free_ports
from tests.waiting import until

KEY = lease_key(b"a secret")


class SideChannel:
    """The wire of a side channel: lease answers, else a handshake as vLLM's has it."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.answers = Answers(self.leases, KEY, lambda: {"pins": self.leases.held()[0]})
        self.port = free_ports(1)[0]
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, 50)
        self._socket.bind(f"tcp://127.0.0.1:{self.port}")
        self._open = True
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._open:
            try:
                identity, _, message = self._socket.recv_multipart()
            except zmq.Again:
                continue
            what, _pp, _tp = msgspec.msgpack.decode(message)
            answer = self.answers.answer(what)
            self._socket.send_multipart((identity, b"", answer or b"handshake", b"clock"))
        self._socket.close()

    def ask(self, **body: Any) -> dict[str, Any]:
        return ask("127.0.0.1", self.port, body, 5)

    def close(self) -> None:
        self._open = False
        self._thread.join()


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    channel = SideChannel()
    yield channel
    channel.close()


def claims_over_wire() -> Claims:
    def claim(host: str, port: int, turn: str, reader: str) -> Claim:
        return claim_of(ask(host, port, {"turn": turn, "reader": reader}, 5))

    def back(host: str, port: int, turn: str, reader: str) -> None:
        ask(host, port, {"turn": turn, "reader": reader, "back": True}, 5)

    return Claims(claim, back)


def settled(claims: Claims, pending: Any) -> Claim:
    until("an answer", lambda: claims.result(pending) is not None)
    answer = claims.result(pending)
    assert answer is not None
    return answer


def test_a_turn_is_claimed_and_given_back(channel: SideChannel) -> None:
    deadline = channel.leases.clock() + 100
    channel.leases.pin("turn", [1], 128, deadline)
    claims = claims_over_wire()
    pending = claims.start("127.0.0.1", channel.port, "turn", "me")
    assert settled(claims, pending) == (True, 30.0, "granted")
    other = claims.start("127.0.0.1", channel.port, "turn", "you")
    assert settled(claims, other).reason == "claimed"
    claims.give_back(pending)
    until("it is free again", lambda: channel.leases.claim("turn", "you").granted)
    claims.close()


def test_no_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    now = SimpleNamespace(seconds=0.0)

    def silent(*_: Any) -> Claim:
        never.wait(30)
        raise OSError("stopped")

    claims = Claims(silent, silent, clock=lambda: now.seconds)
    pending = claims.start("host", 1, "turn", "me")
    assert claims.result(pending) is None
    now.seconds = claims_module.ANSWER_SECONDS
    refused = claims.result(pending)
    assert refused is not None and refused.reason == "unreachable: no answer in time"
    # The next prompt does not wait for the same silence.
    at_once = claims.result(claims.start("host", 1, "turn", "me"))
    assert at_once is not None and not at_once.granted
    never.set()
    claims.close()


def test_an_answer_that_comes_too_late_is_given_back(channel: SideChannel) -> None:
    channel.leases.pin("turn", [1], 128, channel.leases.clock() + 100)
    claims = claims_over_wire()
    pending = claims.start("127.0.0.1", channel.port, "turn", "me")
    until("decode has granted it", lambda: channel.leases.turns()[0]["reading"])
    pending.asked -= claims_module.ANSWER_SECONDS
    pending.answer, late = Future(), pending.answer
    refused = claims.result(pending)
    assert refused is not None and not refused.granted
    pending.answer.set_result(late.result(5))
    until("decode has it back", lambda: not channel.leases.turns()[0]["reading"])
    claims.close()


def test_nobody_listens() -> None:
    claims = claims_over_wire()
    pending = claims.start("127.0.0.1", free_ports(1)[0], "turn", "me")
    pending.asked -= claims_module.ANSWER_SECONDS
    refused = claims.result(pending)
    assert refused is not None and refused.reason.startswith("unreachable")
    claims.close()


def test_a_listener_that_knows_no_leases_is_told_apart(channel: SideChannel) -> None:
    channel.answers.answer = lambda what: None  # type: ignore[method-assign]
    with pytest.raises(OSError, match="keeps no leases"):
        channel.ask(turn="turn", reader="me")


def test_orders_need_the_key(channel: SideChannel) -> None:
    channel.leases.pin("turn", [1], 128, channel.leases.clock() + 100)
    assert channel.ask(**signed({"release": ["turn"]}, lease_key(b"other"))) == {
        "error": "wrong key"
    }
    assert channel.ask(order='{"release": ["turn"]}') == {"error": "wrong key"}
    answer = channel.ask(**signed({"list": True}, KEY))
    assert [turn["id"] for turn in answer["turns"]] == ["turn"]
    answer = channel.ask(**signed({"release": ["turn", "x"], "renew": {"y": 9}}, KEY))
    assert answer["released"] == ["turn"] and answer["unknown"] == ["x", "y"]


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'"x"', b"{}", b'{"turn": 1, "reader": "x"}'])
def test_what_is_not_understood_is_answered(channel: SideChannel, text: bytes) -> None:
    answer = channel.answers.answer(PREFIX + text)
    assert answer == PREFIX + b'{"error": "not understood"}'


def test_handshakes_are_left_to_vllm(channel: SideChannel) -> None:
    assert channel.answers.answer(b"get_meta_msg") is None
    assert channel.answers.answer(None) is None
