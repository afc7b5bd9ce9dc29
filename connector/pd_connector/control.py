"""Leases over the NIXL side channel: claims from prefill legs, orders from the own API server.

A message rides in the first field of vLLM's handshake question (which has three fields: what,
pipeline rank, tensor rank) so that a listener that does not know it answers with a handshake
instead of failing. docs/engine-http.md describes it.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from pd_connector.contract import SECRET_FILE_VARIABLE
from pd_connector.leases import Claim, Leases
from pd_connector.secret import lease_key, load_secret

PREFIX = b"pd1\n"
"""Starts every message and every answer; the digit is the version."""
_OWN_KEY_VARIABLE = "PD_OWN_LEASE_KEY"
LONGEST_LEASE = 7 * 24 * 3600.0
"""Seconds; a renewal for longer is taken as this."""


def make_own_key() -> None:
    """Give the processes that this one starts a key of their own, for want of a secret."""
    if not os.environ.get(SECRET_FILE_VARIABLE):
        os.environ.setdefault(_OWN_KEY_VARIABLE, os.urandom(32).hex())


def order_key() -> str | None:
    """The key that orders from the API server to its engines are signed with, if there is one.

    Raises SecretError when the secret cannot be read.
    """
    secret = load_secret()
    return lease_key(secret) if secret else os.environ.get(_OWN_KEY_VARIABLE)


def question(body: Mapping[str, Any]) -> bytes:
    """A message for the side channel."""
    return msgspec.msgpack.encode((PREFIX + json.dumps(body).encode(), 0, 0))


def signed(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """``body`` as an order."""
    text = json.dumps(body)
    return {"order": text, "mac": _mac(text, key)}


def ask(host: str, port: int, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """A side channel's answer. Raises OSError when there is none, or none that is understood."""
    path = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    socket: Any = zmq.Context.instance().socket(zmq.REQ)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.connect(path)
        socket.send(question(body))
        if not socket.poll(int(seconds * 1000)):
            raise OSError(f"no answer from {host}:{port} within {seconds:g} s")
        answer = socket.recv_multipart()[0]
    except zmq.ZMQError as error:
        raise OSError(f"{host}:{port}: {error}") from error
    finally:
        socket.close()
    if not answer.startswith(PREFIX):
        raise OSError(f"{host}:{port} keeps no leases")
    body = json.loads(answer[len(PREFIX) :])
    if not isinstance(body, dict):
        raise OSError(f"{host}:{port} gave an answer that is not understood")
    return body


def claim_of(answer: Mapping[str, Any]) -> Claim:
    """The claim in an answer of :func:`ask`; not granted when it says nothing of the kind."""
    return Claim(
        answer.get("granted") is True,
        float(answer.get("seconds") or 0.0),
        str(answer.get("reason") or "not understood"),
    )


class Answers:
    """What a decode engine's side channel says about its leases."""

    def __init__(
        self, leases: Leases, key: str | None, state: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._leases = leases
        self._key = key
        self._state = state

    def answer(self, what: object) -> bytes | None:
        """The answer to the first field of a question, None when it is not for leases."""
        if not isinstance(what, bytes) or not what.startswith(PREFIX):
            return None
        try:
            body = json.loads(what[len(PREFIX) :])
        except ValueError:
            body = None
        return PREFIX + json.dumps(self._answer(body)).encode()

    def _answer(self, body: object) -> Mapping[str, Any]:
        if not isinstance(body, dict):
            return {"error": "not understood"}
        if isinstance(body.get("order"), str):
            return self._obey(body["order"], str(body.get("mac")))
        turn, reader = body.get("turn"), body.get("reader")
        if not isinstance(turn, str) or not isinstance(reader, str):
            return {"error": "not understood"}
        if body.get("back") is True:
            return {"back": self._leases.unclaim(turn, reader)}
        return self._leases.claim(turn, reader)._asdict()

    def _obey(self, text: str, mac: str) -> Mapping[str, Any]:
        if self._key is None or not hmac.compare_digest(_mac(text, self._key), mac):
            return {"error": "wrong key"}
        order = json.loads(text)
        release, renew = order.get("release") or (), order.get("renew") or {}
        freed = self._leases.release(release, "released")
        left = self._leases.renew(
            {turn: min(float(seconds), LONGEST_LEASE) for turn, seconds in renew.items()}
        )
        return {
            **self._state(),
            "released": [turn for turn, what in freed.items() if what == "released"],
            "reading": [turn for turn, what in freed.items() if what == "reading"],
            "renewed": {turn: round(seconds, 3) for turn, seconds in left.items()},
            "unknown": [
                *(turn for turn, what in freed.items() if what == "unknown"),
                *(turn for turn in renew if turn not in left),
            ],
            "turns": self._leases.turns() if order.get("list") else [],
        }


def _mac(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
