"""The vLLM general plugin: streamed answers carry ``kv_transfer_params``.

vLLM puts the handle of a finished turn into non-streaming answers only. The plugin
wraps the two stream generators of its OpenAI server; where they are not as expected
it warns and leaves vLLM as it is.
"""

import functools
import inspect
import multiprocessing
from collections.abc import AsyncIterator, Callable
from typing import Any

from pd_connector import admission, idle, workers
from pd_connector.contract import (
    KV_TRANSFER_PARAMS,
    LOG_CHECKS_INACTIVE,
    LOG_STREAM_ACTIVE,
    LOG_STREAM_INACTIVE,
)
from pd_connector.control import make_own_key
from pd_connector.stream import HandleTap, with_handle

_MARK = "__pd_connector__"
_RESULTS = "result_generator"

# vLLM loads general plugins in every process; these serve no HTTP.
_ENGINE_CORE = "EngineCore"
_WORKER = "VllmWorker"

_announced = False


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once."""
    from vllm.logger import init_logger  # noqa: PLC0415

    logger = init_logger("vllm.pd_connector.plugin")
    process = multiprocessing.current_process().name
    if process.startswith((_ENGINE_CORE, _WORKER)):
        # An engine core may have its only worker in its own process.
        _try(logger, "pd_connector: workers tell no settings", workers.install)
        if process.startswith(_ENGINE_CORE):
            _try(logger, "pd_connector: an idle engine with pinned turns uses a core", idle.install)
        return
    make_own_key()
    _try(logger, LOG_STREAM_INACTIVE, lambda: _install(logger))
    _try(logger, LOG_CHECKS_INACTIVE, admission.install)


def _try(logger: Any, otherwise: str, install: Callable[[], str | None]) -> None:
    """Change this process, or say why not: vLLM starts in any case."""
    try:
        reason = install()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning("%s: %s", otherwise, reason)


def _install(logger: Any) -> str | None:
    """Wrap both generators, or neither; the reason if they are not wrapped."""
    from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: PLC0415
        ChatCompletionStreamResponse,
    )
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat  # noqa: PLC0415
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion  # noqa: PLC0415
    from vllm.outputs import RequestOutput  # noqa: PLC0415

    if KV_TRANSFER_PARAMS in ChatCompletionStreamResponse.model_fields:
        return "this vLLM has a field of its own for it"
    if "finished" not in (known := inspect.signature(RequestOutput).parameters) or (
        KV_TRANSFER_PARAMS not in known
    ):
        return "vllm.outputs.RequestOutput has no finished or kv_transfer_params"
    seams = (
        (OpenAIServingChat, "chat_completion_stream_generator", _chat_output, ("request",)),
        (
            OpenAIServingCompletion,
            "completion_stream_generator",
            _completion_output,
            ("request", "num_prompts"),
        ),
    )
    if all(hasattr(getattr(cls, name, None), _MARK) for cls, name, _, _ in seams):
        return None
    for cls, name, _, needs in seams:
        method = getattr(cls, name, None)
        if not inspect.isasyncgenfunction(method):
            return f"{cls.__name__}.{name} is not an async generator"
        if missing := {*needs, _RESULTS} - set(inspect.signature(method).parameters):
            return f"{cls.__name__}.{name} has no parameter {', '.join(sorted(missing))}"
    for cls, name, pick, _ in seams:
        setattr(cls, name, _wrap_stream(getattr(cls, name), pick))
        cls.__init__ = _wrap_init(cls.__init__, logger)
    return None


def _chat_output(item: Any) -> Any:
    return item


def _completion_output(item: tuple[int, Any]) -> Any:
    """The first prompt's output: its handle is the one a non-streaming answer has."""
    return item[1] if item[0] == 0 else None


def _wrap_stream(stream: Callable[..., Any], pick: Callable[[Any], Any]) -> Callable[..., Any]:
    signature = inspect.signature(stream)

    @functools.wraps(stream)
    def with_handles(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_kv_connector(self):
            return stream(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        results: AsyncIterator[Any] = call.arguments[_RESULTS]
        tap = HandleTap(aiter(results), pick)
        call.arguments[_RESULTS] = tap
        choices = (call.arguments["request"].n or 1) * call.arguments.get("num_prompts", 1)
        return with_handle(stream(*call.args, **call.kwargs), tap, choices)

    setattr(with_handles, _MARK, True)
    return with_handles


def _wrap_init(init: Callable[..., None], logger: Any) -> Callable[..., None]:
    @functools.wraps(init)
    def announcing(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        global _announced  # noqa: PLW0603
        if not _announced and _has_kv_connector(self):
            _announced = True
            logger.info(LOG_STREAM_ACTIVE)

    return announcing


def _has_kv_connector(serving: Any) -> bool:
    config = getattr(getattr(serving, "engine_client", None), "vllm_config", None)
    return getattr(config, "kv_transfer_config", None) is not None
