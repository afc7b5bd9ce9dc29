"""A leg's side channel: vLLM's NIXL handshake, and leases."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

logger = init_logger("vllm.pd_connector.sidechannel")


def serve_side_channel(
    encoded_data: Mapping[tuple[int, int], bytes],
    ready_event: Any,
    stop_event: Any,
    host: str,
    port: int,
    lease_answer: Callable[[object], bytes | None],
) -> None:
    """Answer until ``stop_event``; a message that is not understood is left unanswered."""
    with zmq_ctx(zmq.ROUTER, make_zmq_path("tcp", host, port)) as sock:
        sock.setsockopt(zmq.RCVTIMEO, 1000)
        ready_event.set()
        while not stop_event.is_set():
            try:
                frames = sock.recv_multipart()
            except zmq.Again:
                continue
            try:
                identity, _, message = frames
                what, pp_rank, tp_rank = msgspec.msgpack.decode(message)
                answer = lease_answer(what)
                if answer is not None:
                    sock.send_multipart((identity, b"", answer))
                    continue
                clock = msgspec.msgpack.encode(time.perf_counter())
                sock.send_multipart((identity, b"", encoded_data[(pp_rank, tp_rank)], clock))
            except Exception as error:
                logger.warning("side channel: a message was not understood: %r", error)
