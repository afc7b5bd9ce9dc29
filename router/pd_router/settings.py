"""The router's one config file, checked, in one immutable place.

JSON; ``pdctl render`` writes it as ``router.json``. Durations are seconds, sizes bytes.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

Connector = Literal["pdctl", "stock"]
ReuseProof = Literal["connector", "tokens", "messages", "off"]
RoutePin = Literal["auto", "recompute", "readback", "append"]

Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=1 << 50)]

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class SettingsError(Exception):
    """A config file that cannot be used; the message is one line."""


class LegSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine."""

    url: str
    bidirectional: bool = True
    """Its bidirectional_kv_xfer is on: a prefill leg without it hangs on a handle."""
    prefix_caching: bool = False
    """It finds the history of a conversation in its own prefix cache."""


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds per token; what is left out is learned from the turns."""

    prefill: Rate | None = None
    """Computed by a prefill leg."""
    append: Rate | None = None
    """Computed by a decode leg."""
    readback: Rate | None = None
    """Read back, decode to prefill."""
    handover: Rate | None = None
    """Moved prefill to decode."""


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PEM files."""

    certificate: str
    """The certificate and those that vouch for it."""
    key: str


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One router process."""

    name: str
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    prefill: Annotated[dict[str, LegSettings], Meta(min_length=1)]
    """By leg name."""
    decode: Annotated[dict[str, LegSettings], Meta(min_length=1)]

    connector: Connector = "pdctl"
    bidirectional: bool = True
    reuse_proof: ReuseProof | None = None
    """What has to show that a prompt starts with a handle's tokens; None: the safe one."""
    handle_ttl: Seconds = 450.0
    handle_max_age: Seconds | None = None
    """Until this age a handle's blocks are renewed on decode, ``handle_ttl`` at a time, unless its
    conversation goes on or ends before; None: never."""
    decode_ttl: Seconds = 480.0
    recompute_threshold: Annotated[int, Meta(ge=0)] = 64
    """Fewer reusable tokens than this are not worth a handle."""
    block_size: Count | None = None
    """Tokens of a KV block, where it is known."""

    conversation_headers: tuple[str, ...] = ()
    """Further request headers that name a conversation."""
    tenant_header: str | None = None
    """Request header that names the tenant; None: the Authorization header does."""

    route: RoutePin = "auto"
    append_max_tokens: Annotated[int, Meta(ge=0)] = 2048
    """Most tokens that a decode leg may compute of a prompt."""
    max_decode_stall_ms: Annotated[float, Meta(ge=0)] = 200.0
    """Longest time that a prompt may take from a decode leg with running streams."""
    rates: Rates = Rates()

    prefill_timeout: Seconds = 600.0
    """Bound of a prefill that carries no handle."""
    readback_timeout: Seconds = 60.0
    """Bound of a prefill that carries a handle."""
    handover_timeout: Seconds = 20.0
    """Longest time between prefill's answer and the decode request: prefill keeps its blocks
    for 30 s (vLLM's kv_lease_duration) until decode asks for them."""
    stream_idle_timeout: Seconds = 300.0
    """Longest silence of decode within a stream, its first event included."""
    pair_pause: Seconds = 30.0
    """How long no handle is sent between two legs whose transfers fail."""
    answer_timeout: Seconds = 1800.0
    """Bound of decode's answer when it is not streamed."""

    max_handles: Count = 100_000
    max_handle_bytes: Count = 512 << 20
    max_branches: Count = 4
    """Handles of one conversation that are held at once."""
    max_body_bytes: Count = 64 << 20

    native: bool = True
    """Plain parts of streams are passed on by the native part, where it was built."""

    tls: Tls | None = None
    api_keys_file: str | None = None
    """One key a line; None: everybody may ask."""
    admin_token_file: str | None = None
    """The token of /admin; None: /admin answers on loopback alone."""
    deployment: str = "default"
    """Routers of one deployment share what ``state`` holds."""
    state: str = "memory"
    """Where handles are held: ``memory``, or the ``redis://`` URL that several routers share."""
    state_timeout: Seconds = 0.25
    """How long a turn waits for a shared ``state``; then it goes on without reuse."""
    drain_timeout: Seconds = 30.0
    """How long running requests may go on after SIGTERM."""
    client_stall_timeout: Seconds = 120.0
    """How long a client may take nothing of an answer that waits for it."""
    body_timeout: Seconds = 60.0
    """How long a request's body may take to arrive."""
    keep_alive_timeout: Seconds = 75.0
    """How long a client's connection may stay without a whole request."""
    max_requests: Count = 4096
    """Requests in flight; more are answered with 503."""
    max_header_bytes: Annotated[int, Meta(ge=256, le=1 << 20)] = 16384
    """Of one header, and of the request line."""
    max_headers: Annotated[int, Meta(ge=16, le=10_000)] = 128

    otlp_endpoint: str | None = None
    otlp_protocol: Literal["grpc", "http/protobuf"] = "grpc"
    trace_conversation_ids: bool = False
    """Spans tell the conversation's id in clear."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def proof(self) -> ReuseProof:
        """:attr:`reuse_proof`, or the safe one for the connector; ``off`` without readback."""
        if not self.bidirectional:
            return "off"
        return self.reuse_proof or ("connector" if self.connector == "pdctl" else "tokens")


def load(path: Path) -> Settings:
    """Settings of a config file.

    Raises:
        SettingsError: it cannot be read or used.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    return parse(raw, str(path))


def parse(raw: bytes, where: str) -> Settings:
    """Settings of a config file's bytes.

    Raises:
        SettingsError: they cannot be used.
    """
    try:
        settings = msgspec.json.decode(raw, type=Settings)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where}: {error}") from None
    for problem in _problems(settings):
        raise SettingsError(f"{where}: {problem}")
    return settings


def _problems(settings: Settings) -> Iterator[str]:
    if twice := sorted(settings.prefill.keys() & settings.decode.keys()):
        yield f"leg name used twice: {', '.join(twice)}"
    for name, leg in (*settings.prefill.items(), *settings.decode.items()):
        if not _is_url(leg.url):
            yield f"{name}: {leg.url!r} is not an http URL of a host and port"
    if settings.handle_ttl >= settings.decode_ttl:
        yield (
            f"handle_ttl {settings.handle_ttl:g} must be below decode_ttl {settings.decode_ttl:g}"
        )
    if settings.handle_max_age is not None and settings.handle_max_age <= settings.handle_ttl:
        yield (
            f"handle_max_age {settings.handle_max_age:g} must be above handle_ttl "
            f"{settings.handle_ttl:g}"
        )
    if settings.reuse_proof == "connector" and settings.connector == "stock":
        yield "reuse_proof connector needs the pdctl connector on the legs"
    for header in (*settings.conversation_headers, settings.tenant_header):
        if header is not None and not _HEADER_NAME.fullmatch(header):
            yield f"{header!r} is not a header name"
    if settings.state != "memory" and not settings.state.startswith(("redis://", "rediss://")):
        yield f"state: {settings.state!r} is neither memory nor a redis:// URL"
    if settings.otlp_endpoint is not None and not _is_url(settings.otlp_endpoint):
        yield f"otlp_endpoint: {settings.otlp_endpoint!r} is not an http URL"


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and not (parts.query or parts.fragment or parts.username)
        )
    except ValueError:
        return False
