"""A decode leg whose streamed answers a test writes itself, byte by byte, and a client that
keeps what arrives as it arrives."""

import contextlib
import queue
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from router_rig import DEADLINE, Router, wait_for
from tests.ports import free_ports

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
_OTHERS = b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n"


def chunk(payload: bytes, size: bytes | None = None) -> bytes:
    """``payload`` as one chunk; ``size`` is its size line, where that is to be an odd one."""
    return (b"%x" % len(payload) if size is None else size) + b"\r\n" + payload + b"\r\n"


class RawStream:
    """One request to the engine, whose answer the test sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._over = threading.Event()

    def send(self, data: bytes) -> None:
        """Returns when the router has read it."""
        self._connection.sendall(data)
        wait_for(self._taken, "the router reads what the engine sends", pause=0)

    def send_all(self, data: bytes) -> None:
        """Returns when it is on its way."""
        self._connection.sendall(data)

    def flood(self, data: bytes, times: int, pause: float = 0) -> int:
        """Send ``times`` or until the router ends the connection; how many bytes it took."""
        sent = 0
        with contextlib.suppress(OSError):
            for _ in range(times):
                self._connection.sendall(data)
                sent += len(data)
                time.sleep(pause)
        return sent

    def finish(self) -> None:
        """The answer is whole; the connection takes the next request."""
        self._over.set()

    def close(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)
        self._over.set()

    def reset(self) -> None:
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()
        self._over.set()

    def wait_ended(self) -> None:
        """Until the router has ended the connection."""
        with contextlib.suppress(ConnectionError):
            self._connection.settimeout(DEADLINE)
            assert self._connection.recv(1) == b""
        self._over.set()

    def wait_over(self) -> None:
        self._over.wait()

    def _taken(self) -> bool:
        """Nothing waits in the router's socket."""
        ours, theirs = self._connection.getsockname()[1], self._connection.getpeername()[1]
        ends = f":{theirs:04X} 0100007F:{ours:04X} "
        for line in Path("/proc/net/tcp").read_text().splitlines():
            if ends in line:
                return line.split()[4].endswith(":00000000")
        return True


class RawEngine:
    """Stands for a FakeEngine in a router's legs."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.secrets: list[str] = []
        self.connections = 0
        """That came with a request for an answer."""
        self._streams: queue.Queue[RawStream] = queue.Queue()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """Take no more connections; those that are there go on."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def stop(self) -> None:
        self.refuse()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """As FakeEngine's; there is nothing to forget."""

    def next(self) -> RawStream:
        """The next request."""
        return self._streams.get(timeout=DEADLINE)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        streams = 0
        with connection, contextlib.suppress(OSError):
            while head := _request(connection):
                if head.startswith(b"POST /v1/"):
                    self.connections += not streams
                    streams += 1
                    stream = RawStream(connection)
                    self._streams.put(stream)
                    stream.wait_over()
                else:
                    connection.sendall(_OTHERS % (200 if b" /health " in head else 404))
        self._open.discard(connection)


def _request(connection: socket.socket) -> bytes:
    """The head of the next request; empty at the connection's end."""
    got = b""
    while b"\r\n\r\n" not in got:
        piece = connection.recv(65536)
        if not piece:
            return b""
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            left = int(line.split(b":")[1]) - len(body)
            while left > 0:
                left -= len(connection.recv(min(left, 65536))) or left
    return head


class RawClient:
    """One request; what comes back is read by a thread, so that it never waits for the test."""

    def __init__(
        self,
        router: Router,
        body: bytes,
        path: str = "/v1/chat/completions",
        *,
        reads: bool = True,
        version: str = "1.1",
    ) -> None:
        """``reads``: at once; else from :meth:`read` on."""
        self.got = bytearray()
        self._socket = socket.socket()
        if not reads:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", int(router.url.rpartition(":")[2])))
        head = f"POST {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._thread = threading.Thread(target=self._read, daemon=True)
        if reads:
            self.read()

    def read(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while piece := self._socket.recv(65536):
                self.got += piece

    def answer(self) -> bytes:
        """The body, whole and without its framing; fails if it does not end as it should."""
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), bytes(self.got[-500:])
        head, _, raw = bytes(self.got).partition(b"\r\n\r\n")
        self._socket.close()
        if b"chunked" not in head.lower():
            return raw
        pieces, at = [], 0
        while True:
            end = raw.index(b"\r\n", at)
            size, at = int(raw[at:end], 16), end + 2
            assert raw[at + size : at + size + 2] == b"\r\n", raw[at : at + 200]
            pieces.append(raw[at : at + size])
            at += size + 2
            if not size:
                assert at == len(raw)
                return b"".join(pieces)

    def leave(self, *, reset: bool = False) -> None:
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join(DEADLINE)
        self._socket.close()


def spliced(router: Router) -> int:
    """Streams that are in the native part."""
    told: dict[str, Any] = router.get("/admin/process").json()
    return int(told["spliced"])
