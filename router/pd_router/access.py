"""Who may ask: API keys of clients, and the token of the operator."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from aiohttp import web
from yarl import URL

from pd_connector import contract
from pd_router.errors import TurnError
from pd_router.settings import Settings, SettingsError

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Asked by probes and Prometheus, with no key."""

# A request that came through a proxy is not from this machine, whatever its peer is.
_PROXY_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")


_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Access:
    """The keys and the token, as digests."""

    def __init__(self, settings: Settings) -> None:
        """Raises :class:`SettingsError` for a file that cannot be used."""
        self._keys = _digests(settings.api_keys_file, "api_keys_file")
        self._admin = _digests(settings.admin_token_file, "admin_token_file")

    def check(self, request: web.Request) -> None:
        """Raises :class:`TurnError` (401) if API keys are asked for and there is no good one."""
        if self._keys is None or request.path in OPEN_PATHS:
            return
        if self._admin is not None and request.path.startswith(contract.ADMIN_PATH):
            return  # Its token is a bearer too, so that there is no place for a key.
        presented = (_bearer(request), request.headers.get("x-api-key", ""))
        if not any([_among(key, self._keys) for key in presented if key]):
            raise _unauthorized("A valid API key is needed.")

    def check_admin(self, request: web.Request) -> None:
        """Raises :class:`TurnError` (401, 403) if the request is not the operator's."""
        if self._admin is not None:
            if not _among(_bearer(request), self._admin):
                raise _unauthorized("The admin token is needed.")
            return
        if not _is_local(request):
            raise TurnError(
                403, "Without admin_token_file, /admin answers on loopback.", "permission_error"
            )


def _unauthorized(message: str) -> TurnError:
    return TurnError(401, message, "authentication_error", headers={"WWW-Authenticate": "Bearer"})


def _bearer(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _among(key: str, digests: Iterable[bytes]) -> bool:
    """Whether it is one of them, in a time that does not tell which, or how nearly."""
    digest = _digest(key)
    # A list, so that every one is compared.
    return any([hmac.compare_digest(digest, known) for known in digests])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _digests(path: str | None, name: str) -> list[bytes] | None:
    if path is None:
        return None
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(f"{name}: {path}: {reason}") from None
    keys = [line.strip() for line in lines]
    found = [_digest(key) for key in keys if key and not key.startswith("#")]
    if not found:
        raise SettingsError(f"{name}: {path}: there is no key in it; write one a line")
    return found


def _is_local(request: web.Request) -> bool:
    """From this machine, and not by way of a proxy or a web page on it."""
    if any(name in request.headers for name in _PROXY_HEADERS) or "Origin" in request.headers:
        return False
    peer = request.transport.get_extra_info("peername") if request.transport else None
    try:
        # A page on this machine can reach it under any name that was made to point here.
        named = URL.build(authority=request.host).host in _LOCAL_NAMES
        return named and peer is not None and ipaddress.ip_address(peer[0]).is_loopback
    except ValueError:
        return False
