"""An engine that only keeps finished turns' blocks sleeps instead of stepping without pause.

vLLM steps for as long as a finished request keeps its blocks, a millisecond apart, and so an idle
decode leg with kept turns uses most of a core; its worker process spins for a second after each
step besides. Nothing there is urgent: what a step finds is that a deadline has passed or that
prefill has no use for a turn. A request, a claim or an order ends the sleep at once.

What an idle leg still uses is NIXL's progress thread, which polls without pause with or without
kept turns.
"""

import functools
from collections.abc import Callable
from typing import Any

LONGEST = 10.0
"""Seconds; a turn that prefill has no use for is freed so much later, at most."""
BRIEFLY = 0.1
"""While a turn is read or prefill's blocks wait for decode."""
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
        if not executed and type(self) is core and (leases := _leases_of(self)) is not None:
            _sleep(self.input_queue, leases, _seconds(self, leases))
        return executed

    setattr(stepping, _MARK, True)
    core._process_engine_step = stepping
    return None


def _leases_of(engine: Any) -> Any:
    """The lease table of an engine that has nothing to do but keep turns, else None."""
    scheduler = engine.scheduler
    if scheduler.has_unfinished_requests() or getattr(engine, "batch_queue", None):
        return None
    if getattr(scheduler, "finished_req_ids", None) or engine.shutdown_state != 0:
        return None
    if not scheduler.has_requests():
        return None
    ours: Any = getattr(scheduler.get_kv_connector(), "connector_scheduler", None)
    return ours.leases.table if getattr(ours, "may_sleep", False) else None


def _seconds(engine: Any, leases: Any) -> float:
    if len(engine.scheduler.requests) != leases.held()[0]:
        return BRIEFLY
    quiet: float = leases.quiet_for()
    return min(max(quiet, BRIEFLY), LONGEST)


def _sleep(queue: Any, leases: Any, seconds: float) -> None:
    woken = queue.not_empty

    def wake() -> None:
        with woken:
            woken.notify_all()

    leases.changed = wake
    with woken:
        # What changed before is seen here: the table tells of it until the next step.
        if not queue.queue and (seconds <= BRIEFLY or leases.quiet_for()):
            woken.wait(seconds)
