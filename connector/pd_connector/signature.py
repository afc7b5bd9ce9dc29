"""Signed handles: a leg takes only what a leg of its own deployment has made, and each once.

A handle is signed with a key of the deployment's secret (:mod:`pd_connector.secret`), so that
nobody else can name blocks to be read. The deadline has a signature of its own, because a
renewed lease moves it.

What single use means: a leg remembers the handles it has read, so the same leg never reads one
twice. Several prefill legs do not tell each other; there decode's rule holds, that the first read
frees the blocks, and the router's, that it hands a handle out once.
"""

import base64
import hmac
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

from pd_connector.contract import (
    DO_REMOTE_DECODE,
    DO_REMOTE_PREFILL,
    PD_EXPIRY_SIGNATURE,
    PD_LEASE,
    PD_SIGNATURE,
    PD_TOKENS,
    REMOTE_BLOCK_IDS,
    REMOTE_ENGINE_ID,
    REMOTE_EXPIRY,
    REMOTE_HOST,
    REMOTE_NUM_TOKENS,
    REMOTE_PORT,
    REMOTE_REQUEST_ID,
)
from pd_connector.secret import HANDLES, derived_key

VERSION = "1"

SIGNED = (
    DO_REMOTE_PREFILL,
    DO_REMOTE_DECODE,
    REMOTE_BLOCK_IDS,
    REMOTE_ENGINE_ID,
    REMOTE_REQUEST_ID,
    REMOTE_HOST,
    REMOTE_PORT,
    REMOTE_NUM_TOKENS,
    "tp_size",
    "dcp_size",
    "pp_size",
    "transfer_mode",
    PD_TOKENS,
    PD_LEASE,
)
"""Fields under the signature, in its order; a missing one counts as null."""

Refusal = Literal["unsigned", "forged", "foreign", "altered", "used"]
"""Why a handle is not taken: it has no signature, one that is none, one of another deployment's
key, one that does not hold for its fields, or it was read before."""


class Signer:
    """Signs and checks handles with a deployment's secret.

    A signature is ``1.<key id>.<HMAC-SHA256, 128 bits of it>``.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = derived_key(secret, HANDLES)
        self._key_id = derived_key(self._key, b"key id").hex()[:8]

    def signed(self, handle: Mapping[str, Any]) -> dict[str, Any]:
        """The handle with its signatures."""
        return {
            **handle,
            PD_SIGNATURE: self._sign(_fields(handle)),
            PD_EXPIRY_SIGNATURE: self.sign_expiry(
                handle.get(REMOTE_ENGINE_ID),
                handle.get(REMOTE_REQUEST_ID),
                handle.get(REMOTE_EXPIRY),
            ),
        }

    def sign_expiry(self, engine_id: Any, request_id: Any, expiry: float | None) -> str:
        """The signature of a handle's deadline, for :data:`PD_EXPIRY_SIGNATURE`."""
        return self._sign(["expiry", engine_id, request_id, _number(expiry)])

    def refusal(self, handle: Mapping[str, Any]) -> Refusal | None:
        """Why the handle is not one of this deployment's, None when it is."""
        return self._check(handle.get(PD_SIGNATURE), _fields(handle)) or self._check(
            handle.get(PD_EXPIRY_SIGNATURE),
            [
                "expiry",
                handle.get(REMOTE_ENGINE_ID),
                handle.get(REMOTE_REQUEST_ID),
                _number(handle.get(REMOTE_EXPIRY)),
            ],
        )

    def _sign(self, fields: list[Any]) -> str:
        return f"{VERSION}.{self._key_id}.{self._mac(fields)}"

    def _check(self, signature: object, fields: list[Any]) -> Refusal | None:
        if signature is None:
            return "unsigned"
        parts = signature.split(".") if isinstance(signature, str) else []
        if len(parts) != 3 or parts[0] != VERSION or not signature.isascii():  # type: ignore[attr-defined]
            return "forged"
        if parts[1] != self._key_id:
            return "foreign"
        return None if hmac.compare_digest(parts[2], self._mac(fields)) else "altered"

    def _mac(self, fields: list[Any]) -> str:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(hmac.digest(self._key, text, "sha256")[:16]).decode()


class UsedHandles:
    """The handles that this leg has read, each for a limited time. Not safe among threads."""

    def __init__(self, seconds: float, most: int = 200_000) -> None:
        self._seconds = seconds
        self._most = most
        self._until: OrderedDict[tuple[Any, Any], float] = OrderedDict()

    def add(self, handle: Mapping[str, Any], now: float) -> None:
        self._forget(now)
        self._until[_name(handle)] = now + self._seconds

    def __contains__(self, handle: Mapping[str, Any]) -> bool:
        return _name(handle) in self._until

    def _forget(self, now: float) -> None:
        while self._until:
            name, until = next(iter(self._until.items()))
            if until > now and len(self._until) < self._most:
                return
            del self._until[name]


def _name(handle: Mapping[str, Any]) -> tuple[Any, Any]:
    return handle.get(REMOTE_ENGINE_ID), handle.get(REMOTE_REQUEST_ID)


def _fields(handle: Mapping[str, Any]) -> list[Any]:
    return ["handle", *(handle.get(field) for field in SIGNED)]


def _number(value: Any) -> Any:
    """A JSON writer may drop the fraction of a whole number."""
    return float(value) if isinstance(value, int) else value
