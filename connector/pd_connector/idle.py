"""An engine that only keeps finished turns' blocks sleeps instead of stepping without pause.

vLLM steps for as long as a finished request keeps its blocks, a millisecond apart, and so an idle
decode leg with pinned turns uses most of a core. Nothing there is urgent: what a step finds is
that a read has ended or a deadline has passed. A new request ends the sleep at once.
"""

import functools
from collections.abc import Callable
from typing import Any

SECONDS = 0.2
_MARK = "__pd_connector__"


def install() -> str | None:
    """Let this process's engine core sleep between steps without work; the reason if not."""
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415

    return let_sleep(EngineCoreProc)


def let_sleep(core: Any) -> str | None:
    """As :func:`install`, for a class of engine cores."""
    step: Callable[..., Any] | None = getattr(core, "_process_engine_step", None)
    if step is None:
        return f"{core.__name__} has no _process_engine_step"
    if hasattr(step, _MARK):
        return None

    @functools.wraps(step)
    def stepping(self: Any) -> Any:
        executed = step(self)
        # Ranks of a data-parallel engine wait for each other: those step as they are.
        if not executed and type(self) is core and _only_keeps(self):
            _sleep(self.input_queue)
        return executed

    setattr(stepping, _MARK, True)
    core._process_engine_step = stepping
    return None


def _only_keeps(engine: Any) -> bool:
    scheduler = engine.scheduler
    if scheduler.has_unfinished_requests() or getattr(engine, "batch_queue", None):
        return False
    if getattr(scheduler, "finished_req_ids", None) or engine.shutdown_state != 0:
        return False
    connector = scheduler.get_kv_connector()
    return bool(getattr(getattr(connector, "connector_scheduler", None), "may_sleep", False))


def _sleep(queue: Any) -> None:
    with queue.not_empty:
        if not queue.queue:
            queue.not_empty.wait(SECONDS)
