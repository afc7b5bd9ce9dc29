"""Who asks, and in which conversation: the keys that handles are found by."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from pd_connector import contract
from pd_router.history import Past, Prompt
from pd_router.settings import Settings


class Identity(msgspec.Struct, frozen=True, gc=False):
    """One request's tenant and conversation."""

    tenant: bytes
    """A digest; nobody else's handles are found with it."""
    conversation: str | None
    """As the client named it; None: the history names it."""

    def keys(self, prompt: Prompt) -> list[str]:
        """Keys that the turn before may be held under, the likeliest first."""
        if self.conversation is not None:
            return [self._named(self.conversation)]
        return [self._anchored(anchor) for anchor in prompt.anchors()]

    def key(self, past: Past) -> str | None:
        """The key of a finished turn; None: no later turn could find it."""
        if self.conversation is not None:
            return self._named(self.conversation)
        return self._anchored(past.anchor) if past.anchor else None

    @property
    def label(self) -> str:
        """The conversation for logs and spans, not in clear; ``-`` when it has no name."""
        return "-" if self.conversation is None else self._named(self.conversation)[:12]

    def _named(self, conversation: str) -> str:
        text = conversation.encode(errors="surrogatepass")
        return hashlib.blake2b(b"id" + text, digest_size=16, key=self.tenant).hexdigest()

    def _anchored(self, anchor: bytes) -> str:
        return hashlib.blake2b(b"history" + anchor, digest_size=16, key=self.tenant).hexdigest()


def identify(headers: Mapping[str, str], named: Any, settings: Settings) -> Identity:
    """The identity of a request.

    Args:
        named: the body's ``conversation_id``, which goes before any header.
    """
    return Identity(_tenant(headers, settings.tenant_header), _name(headers, named, settings))


def _name(headers: Mapping[str, str], named: Any, settings: Settings) -> str | None:
    if isinstance(named, str | int) and named != "":
        return str(named)
    for name in (*contract.CONVERSATION_HEADERS, *settings.conversation_headers):
        if found := headers.get(name):
            return found
    return None


def _tenant(headers: Mapping[str, str], header: str | None) -> bytes:
    if header is not None and header in headers:
        text = "header " + headers[header]
    else:
        text = "authorization " + headers.get("Authorization", "")
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
