"""Errors as the client sees them: OpenAI's shape, and nothing of the engines' insides."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from pd_connector import contract
from pd_router import jsonbytes

RETRY_AFTER_SECONDS = 2

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
        self, status: int, message: str, kind: str, *, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.retry_after = retry_after

    def response(self) -> web.Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return error_response(self.status, self.message, self.kind, headers)


class EngineRefused(Exception):
    """An engine answered 4xx: the client's own fault, passed on as it came, less any handle."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"engine answered {status}")
        self.status = status
        self.body = body

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.body, headers={"Content-Type": "application/json"}
        )


def bad_request(message: str) -> TurnError:
    return TurnError(400, message, "invalid_request_error")


def unavailable(message: str) -> TurnError:
    return TurnError(503, message, "service_unavailable", retry_after=RETRY_AFTER_SECONDS)


def error_object(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": status}}


def error_response(
    status: int, message: str, kind: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.json_response(error_object(status, message, kind), status=status, headers=headers)


def refusal(status: int, raw: bytes, secrets: Iterable[str]) -> EngineRefused:
    """An engine's 4xx for the client, rid of ``secrets`` and of the parts of handles.

    vLLM repeats the whole request body in some of its validation errors, the
    ``kv_transfer_params`` that the router had put there with it.
    """
    text = raw.decode(errors="replace")
    if not text.lstrip().startswith("{") or _tells(text, secrets):
        error = error_object(status, _reasons(text, secrets), "invalid_request_error")
        raw = jsonbytes.dump(error)
    return EngineRefused(status, raw)


def clean_error_event(data: bytes, secrets: Iterable[str]) -> bytes | None:
    """A replacement for an engine's error event that tells too much; None: it does not."""
    if not _tells(data.decode(errors="replace"), secrets):
        return None
    return jsonbytes.dump(error_object(500, "The engine failed.", "engine_error"))


def secrets_in(params: Mapping[str, Any] | None) -> list[str]:
    """The values of ``kv_transfer_params`` that name an engine, a host or a request."""
    names = (contract.REMOTE_ENGINE_ID, contract.REMOTE_REQUEST_ID, contract.REMOTE_HOST)
    return [str(params[name]) for name in names if params and params.get(name)]


def _reasons(text: str, secrets: Iterable[str]) -> str:
    try:
        message = str(jsonbytes.load(text.encode())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "The engine refused the request."
    reasons = "; ".join(single or double for single, double in _VALIDATION_MSG.findall(message))
    if not reasons or _tells(reasons, secrets):
        return "The engine refused the request."
    return reasons


def _tells(text: str, secrets: Iterable[str]) -> bool:
    return any(word in text for word in (*_HANDLE_WORDS, *secrets))
