"""The side channel's listener: answers NIXL handshakes and outlives every other message.

vLLM's own ends with its thread at the first message that it cannot read, and nobody notices
until a peer connects. The protocol is vLLM's (``nixl/base_scheduler.py``).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

logger = init_logger("vllm.pd_connector.handshake")

PARAMETERS = ("encoded_data", "ready_event", "stop_event", "host", "port")
"""Of the listener of vLLM that this one takes the place of."""

LARGEST_MESSAGE = 65536
"""Bytes; a handshake has about 20."""
_COMPLAIN_EVERY = 10.0


def serve_handshakes(
    encoded_data: dict[Any, Any],
    ready_event: threading.Event,
    stop_event: threading.Event,
    host: str,
    port: int,
    lease_answer: Callable[[object], bytes | None] = lambda word: None,
) -> None:
    """Answer until ``stop_event``, at the configured address alone.

    ``lease_answer`` answers a question's word when it is about leases.
    """
    refused = 0
    complain_at = 0.0
    with zmq_ctx(zmq.ROUTER, make_zmq_path("tcp", host, port)) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        ready_event.set()
        while not stop_event.is_set():
            try:
                frames = socket.recv_multipart()
            except zmq.Again:
                continue
            answer = answer_to(frames, encoded_data, lease_answer)
            if answer is not None:
                try:
                    socket.send_multipart(answer)
                except zmq.ZMQError as error:
                    logger.warning("pd_connector: handshake not answered: %s", error)
                continue
            refused += 1
            if time.monotonic() >= complain_at:
                complain_at = time.monotonic() + _COMPLAIN_EVERY
                logger.warning(
                    "pd_connector: %d messages to the side channel were no handshakes", refused
                )


def answer_to(
    frames: Sequence[bytes],
    encoded_data: Mapping[Any, Any],
    lease_answer: Callable[[object], bytes | None] = lambda word: None,
) -> list[Any] | None:
    """The frames to send back, None for a message that is not understood or asks for no rank."""
    if len(frames) != 3:
        return None
    identity, _, body = frames
    try:
        word, *rank = msgspec.msgpack.decode(body)
        if (answer := lease_answer(word)) is not None:
            return [identity, b"", answer]
        data = encoded_data[tuple(rank) if len(rank) > 1 else rank[0]]
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError):
        return None
    if word != GET_META_MSG:
        return None
    # Lets the peer relate its clock to that of this process, which stamps deadlines.
    return [identity, b"", data, msgspec.msgpack.encode(time.perf_counter())]
