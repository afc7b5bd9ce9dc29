"""A leg's side channel: vLLM's NIXL handshake, and leases.

vLLM's own listener ends with its thread at the first message that it cannot read, and nobody
notices until a peer connects; this one outlives every message.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

logger = init_logger("vllm.pd_connector.sidechannel")

LARGEST_MESSAGE = 2**22
"""Bytes; a handshake question has about 20, an order for 10,000 turns about a million."""
_COMPLAIN_EVERY = 10.0

LeaseAnswer = Callable[[object], bytes | None]


def serve_side_channel(
    encoded_data: Mapping[tuple[int, int], bytes],
    ready_event: threading.Event,
    stop_event: threading.Event,
    host: str,
    port: int,
    lease_answer: LeaseAnswer,
) -> None:
    """Answer until ``stop_event``, at the configured address alone; a message that is not
    understood is left unanswered."""
    refused = 0
    complain_at = 0.0
    with zmq_ctx(zmq.ROUTER, make_zmq_path("tcp", host, port)) as sock:
        sock.setsockopt(zmq.RCVTIMEO, 1000)
        sock.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        ready_event.set()
        while not stop_event.is_set():
            try:
                sock.send_multipart(answer_to(sock.recv_multipart(), encoded_data, lease_answer))
            except zmq.Again:
                continue
            except Exception as error:
                refused += 1
                if time.monotonic() >= complain_at:
                    complain_at = time.monotonic() + _COMPLAIN_EVERY
                    logger.warning(
                        "side channel: %d messages were not understood, the last: %r",
                        refused,
                        error,
                    )


def answer_to(
    frames: Sequence[bytes],
    encoded_data: Mapping[tuple[int, int], bytes],
    lease_answer: LeaseAnswer,
) -> list[bytes]:
    """The frames to send back. Raises whatever a hostile message brings up."""
    identity, _, message = frames
    what, pp_rank, tp_rank = msgspec.msgpack.decode(message)
    answer = lease_answer(what)
    if answer is not None:
        return [identity, b"", answer]
    # Lets the peer relate its clock to that of this process, which stamps deadlines.
    clock = msgspec.msgpack.encode(time.perf_counter())
    return [identity, b"", encoded_data[(pp_rank, tp_rank)], clock]
