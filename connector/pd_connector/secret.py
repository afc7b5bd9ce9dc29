"""The deployment's secret and the keys made of it. Imports nothing of vLLM."""

import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from pd_connector.contract import LEASE_KEY_INPUT, SECRET_FILE_VARIABLE

SHORTEST = 32
"""Characters of a secret, at least: ``openssl rand -hex 32`` writes 64."""

HANDLES = b"pd handle 1"
"""Purpose of the key that handles are signed with."""
PROOFS = b"pd proof 1"
"""Purpose of the key that token proofs are seeded with."""


class SecretError(ValueError):
    """The secret's file cannot be used; the text says why and never holds the secret."""


def load_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret in the file that the environment names, None when it names none.

    Raises SecretError when the file cannot be read or its secret is too short.
    """
    name = environ.get(SECRET_FILE_VARIABLE)
    if not name:
        return None
    try:
        secret = Path(name).expanduser().read_bytes().strip()
    except OSError as error:
        raise SecretError(f"{SECRET_FILE_VARIABLE}={name}: {error.strerror}") from error
    if len(secret) < SHORTEST:
        raise SecretError(
            f"{SECRET_FILE_VARIABLE}={name}: the secret has {len(secret)} bytes, at least "
            f"{SHORTEST} are needed (openssl rand -hex 32)"
        )
    return secret


def derived_key(secret: bytes, purpose: bytes) -> bytes:
    """The 32-byte key for one purpose; it does not tell the secret or another purpose's key."""
    return hmac.digest(secret, purpose, "sha256")


def lease_key(secret: bytes) -> str:
    """What :data:`pd_connector.contract.LEASE_KEY_HEADER` carries."""
    return derived_key(secret, LEASE_KEY_INPUT).hex()
