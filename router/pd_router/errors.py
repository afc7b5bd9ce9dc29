"""Errors as the client sees them: OpenAI's shape, and nothing of the engines' insides."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from aiohttp import web

from pd_connector import contract
from pd_router import jsonbytes

RETRY_AFTER_SECONDS = 2

ErrorForm = Literal["openai", "responses", "anthropic"]
"""Whose clients read an error: its JSON shape, and its event within a stream."""

# Anthropic's error types by status (https://docs.anthropic.com/en/api/errors).
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_HANDLE_WORDS = (
    contract.KV_TRANSFER_PARAMS,
    contract.DO_REMOTE_PREFILL,
    contract.DO_REMOTE_DECODE,
    contract.REMOTE_BLOCK_IDS,
    contract.REMOTE_ENGINE_ID,
    contract.REMOTE_REQUEST_ID,
    contract.REMOTE_HOST,
    contract.REMOTE_PORT,
    contract.PD_TOKENS,
    contract.PD_REUSE,
    contract.PD_SIGNATURE,
    contract.PD_PREVIOUS,
)

# vLLM's validation errors are printed dicts, {'msg': '...', 'input': <the whole body>}.
_VALIDATION_MSG = re.compile(r"""'msg': (?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""")


class TurnError(Exception):
    """A turn that ends in an error answer of the router's own."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        *,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    def response(self, form: ErrorForm = "openai") -> web.Response:
        return error_response(self.status, self.message, self.kind, self.headers, form)


class EngineRefused(Exception):
    """An engine answered 4xx: the client's own fault, passed on as it came, less any handle."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"engine answered {status}")
        self.status = status
        self.body = body

    def response(self, form: ErrorForm = "openai") -> web.Response:
        """The engine has answered in its client's ``form`` already."""
        return web.Response(
            status=self.status, body=self.body, headers={"Content-Type": "application/json"}
        )


def bad_request(message: str) -> TurnError:
    return TurnError(400, message, "invalid_request_error")


def unavailable(message: str) -> TurnError:
    return TurnError(503, message, "service_unavailable", retry_after=RETRY_AFTER_SECONDS)


def error_object(
    status: int, message: str, kind: str, form: ErrorForm = "openai"
) -> dict[str, Any]:
    if form == "anthropic":
        usual = "invalid_request_error" if 400 <= status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(status, usual)
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "code": status}}


def error_response(
    status: int,
    message: str,
    kind: str,
    headers: Mapping[str, str] | None = None,
    form: ErrorForm = "openai",
) -> web.Response:
    body = error_object(status, message, kind, form)
    return web.json_response(body, status=status, headers=headers)


def error_event(status: int, message: str, kind: str, form: ErrorForm = "openai") -> bytes:
    """The event that tells a client of a stream under way that it got no whole answer."""
    if form == "responses":
        body = {"type": "error", "code": kind, "message": message, "param": None}
    else:
        body = error_object(status, message, kind, form)
    name = b"" if form == "openai" else b"event: error\n"
    return name + b"data: " + jsonbytes.dump(body) + b"\n\n"


def refusal(
    status: int, raw: bytes, secrets: Iterable[str], form: ErrorForm = "openai"
) -> EngineRefused | TurnError:
    """An engine's 4xx for the client, rid of ``secrets`` and of the parts of handles; a 502 for
    what is neither that nor an answer.

    vLLM repeats the whole request body in some of its validation errors, the
    ``kv_transfer_params`` that the router had put there with it. What it refuses before it
    looks at the path has OpenAI's form under ``/v1/messages`` too.
    """
    if not 400 <= status < 500:
        return TurnError(502, "An engine failed to answer.", "engine_error")
    text = raw.decode(errors="replace")
    own, message = _error_of(text)
    if own == ("anthropic" if form == "anthropic" else "openai") and not _tells(text, secrets):
        return EngineRefused(status, raw)
    if not message or _tells(message, secrets):
        message = _reasons(message, secrets)
    error = error_object(status, message, "invalid_request_error", form)
    return EngineRefused(status, jsonbytes.dump(error))


def clean_error_event(
    data: bytes, secrets: Iterable[str], form: ErrorForm = "openai"
) -> bytes | None:
    """A replacement for an engine's error event that tells too much; None: it does not."""
    if not _tells(data.decode(errors="replace"), secrets):
        return None
    return error_event(500, "The engine failed.", "engine_error", form)


def secrets_in(params: Mapping[str, Any] | None) -> list[str]:
    """The values of ``kv_transfer_params`` that name an engine, a host or a request."""
    names = (contract.REMOTE_ENGINE_ID, contract.REMOTE_REQUEST_ID, contract.REMOTE_HOST)
    return [str(params[name]) for name in names if params and params.get(name)]


def _error_of(text: str) -> tuple[ErrorForm | None, str]:
    """The form of an engine's error, None where it has neither, and what it says."""
    try:
        body = jsonbytes.load(text.encode())
    except ValueError:
        return None, ""
    if not isinstance(body, dict):
        return None, ""
    error = body.get("error")
    if not isinstance(error, dict):
        # As FastAPI's own: {"detail": "Not Found"}.
        detail = body.get("detail")
        return None, detail if isinstance(detail, str) else ""
    own: ErrorForm = "anthropic" if body.get("type") == "error" else "openai"
    return own, str(error.get("message", ""))


def _reasons(message: str, secrets: Iterable[str]) -> str:
    """The reasons in a validation error's message that tell nothing."""
    reasons = "; ".join(single or double for single, double in _VALIDATION_MSG.findall(message))
    if not reasons or _tells(reasons, secrets):
        return "The engine refused the request."
    return reasons


def _tells(text: str, secrets: Iterable[str]) -> bool:
    return any(word in text for word in (*_HANDLE_WORDS, *secrets))
