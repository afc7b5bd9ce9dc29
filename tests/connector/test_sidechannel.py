"""The side channel answers handshakes whatever else is sent to it."""

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from pd_connector.sidechannel import LARGEST_MESSAGE, serve_side_channel
from tests.ports import free_ports

QUESTION = (b"get_meta_msg", 0, 0)


@pytest.fixture
def port() -> Iterator[int]:
    (port,) = free_ports(1)
    ready, stop = threading.Event(), threading.Event()
    serving = threading.Thread(
        target=serve_side_channel,
        args=(
            {(0, 0): b"metadata"},
            ready,
            stop,
            "127.0.0.1",
            port,
            lambda what: b"lease" if what == b"lease?" else None,
        ),
    )
    serving.start()
    assert ready.wait(10)
    yield port
    stop.set()
    serving.join()


def ask(port: int, message: object) -> list[bytes]:
    with zmq.Context() as context, context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(f"tcp://127.0.0.1:{port}")
        asker.send(msgspec.msgpack.encode(message))
        assert asker.poll(10_000), "no answer"
        return asker.recv_multipart()


def send(port: int, *frames: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 1000)
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send_multipart(frames)


HOSTILE = [
    (b"", msgspec.msgpack.encode((b"get_meta_msg", 7, 7))),
    (b"", msgspec.msgpack.encode((b"get_meta_msg", [], {}))),
    (b"", msgspec.msgpack.encode((b"get_meta_msg",))),
    (b"", msgspec.msgpack.encode(5)),
    (b"", b""),
    (b"", b"\xc1garbage"),
    (b"one frame",),
    (b"", b"a", b"frame", b"too", b"many"),
    (b"", b"x" * (LARGEST_MESSAGE + 1)),
]


@pytest.mark.parametrize("frames", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_message_is_left_unanswered(port: int, frames: tuple[bytes, ...]) -> None:
    send(port, *frames)
    data, clock = ask(port, QUESTION)
    assert data == b"metadata"
    assert isinstance(msgspec.msgpack.decode(clock), float)


def test_only_the_configured_address_is_listened_on(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)


def test_leases_ride_in_the_first_field(port: int) -> None:
    assert ask(port, (b"lease?", 0, 0)) == [b"lease"]
