"""Requests whose ``kv_transfer_params`` vLLM must not see get HTTP 400 from its API server.

Everything that becomes sampling parameters is checked: the request's own field and what arrives
in ``vllm_xargs`` or ``extra_args``.
"""

import functools
from collections.abc import Callable
from typing import Any

from pd_connector.contract import KV_TRANSFER_PARAMS
from pd_connector.counters import observe
from pd_connector.params import ParamsError, check_params
from pd_connector.seams import handle_keys
from pd_connector.telemetry import ENGINE_REJECTED

_MARK = "__pd_connector_checks__"

active = False
"""Whether this process checks."""


def install() -> str | None:
    """Check in this process; the reason when vLLM has not the places for it."""
    global active  # noqa: PLW0603
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (  # noqa: PLC0415
        NixlPullConnectorScheduler,
    )
    from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: PLC0415
        ChatCompletionRequest,
    )
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.input_processor import InputProcessor  # noqa: PLC0415

    known = handle_keys(NixlPullConnectorScheduler)
    requests = (ChatCompletionRequest, CompletionRequest, ResponsesRequest)
    for cls in requests:
        if not callable(getattr(cls, "to_sampling_params", None)):
            return f"{cls.__name__} has no to_sampling_params"
    if not callable(getattr(InputProcessor, "process_inputs", None)):
        return "InputProcessor has no process_inputs"
    for cls in requests:
        _wrap(cls, "to_sampling_params", functools.partial(_check_result, known))
    _wrap(InputProcessor, "process_inputs", functools.partial(_check_argument, known))
    if hasattr(AsyncLLM, "notify_kv_transfer_request_rejected"):
        _wrap(AsyncLLM, "notify_kv_transfer_request_rejected", functools.partial(_notify, known))
    active = True
    return None


def _wrap(cls: Any, name: str, around: Callable[..., Any]) -> None:
    method = getattr(cls, name)
    if hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def checking(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(method, self, *args, **kwargs)

    setattr(checking, _MARK, True)
    setattr(cls, name, checking)


def _check_result(known: frozenset[str] | None, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Before an answer begins: a stream that began has its status sent."""
    params = method(*args, **kwargs)
    _check(params, known)
    return params


def _check_argument(known: frozenset[str] | None, method: Any, *args: Any, **kwargs: Any) -> Any:
    """The last way into the engine, which all endpoints share."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "extra_args"):
            _check(value, known)
    return method(*args, **kwargs)


async def _notify(known: frozenset[str] | None, method: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM tells prefill of a request that was not accepted, with parameters as they came."""
    try:
        for value in (*args, *kwargs.values()):
            if isinstance(value, dict):
                check_params(value, known)
    except ParamsError:
        return None
    return await method(*args, **kwargs)


def _check(sampling_params: Any, known: frozenset[str] | None) -> None:
    extra = getattr(sampling_params, "extra_args", None)
    params = extra.get(KV_TRANSFER_PARAMS) if isinstance(extra, dict) else None
    if not params:
        return
    try:
        check_params(params, known)
    except ParamsError as error:
        observe(ENGINE_REJECTED, error.reason)
        raise
