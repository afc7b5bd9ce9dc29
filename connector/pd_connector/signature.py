"""Signed handles: a leg takes only what a leg of its own deployment has made, and each once.

A handle is signed with a key of the deployment's secret (:mod:`pd_connector.secret`), so that
nobody else can name blocks to be read.

What single use means: decode grants a turn to one reader (:mod:`pd_connector.claims`), whichever
prefill leg asks. Beside that every leg remembers the handles that it has read, which also covers
those that decode reads and those of a decode leg that grants nothing.
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
    REMOTE_EXPIRY,
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

    def sign(self, handle: Mapping[str, Any]) -> str:
        """The signature of a handle, for :data:`PD_SIGNATURE`."""
        return f"{VERSION}.{self._key_id}.{self._mac(handle)}"

    def refusal(self, handle: Mapping[str, Any]) -> Refusal | None:
        """Why the handle is not one of this deployment's, None when it is."""
        signature = handle.get(PD_SIGNATURE)
        if signature is None:
            return "unsigned"
        if not isinstance(signature, str) or not signature.isascii():
            return "forged"
        version, _, rest = signature.partition(".")
        key_id, _, mac = rest.partition(".")
        if version != VERSION or not mac:
            return "forged"
        if key_id != self._key_id:
            return "foreign"
        return None if hmac.compare_digest(mac, self._mac(handle)) else "altered"

    def _mac(self, handle: Mapping[str, Any]) -> str:
        fields = [_canonical(handle.get(field)) for field in SIGNED]
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


def _canonical(value: Any) -> Any:
    """A JSON writer on the way may drop the fraction of a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
