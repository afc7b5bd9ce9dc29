"""Bringing a deployment to what its spec says, and down again."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pdctl.errors import PdctlError
from pdctl.launch import processes
from pdctl.launch.local import check_addresses, new_record, start
from pdctl.launch.probe import (
    ANSWERS,
    NOT_LISTENING,
    error_line,
    fatal_line,
    health_problem,
    last_line,
    tail,
)
from pdctl.launch.state import DeploymentState, LegRecord
from pdctl.plan import Deployment, Leg
from pdctl.render import leg_files

_POLL_SECONDS = 0.25

Say = Callable[[str], None]


class Phase(str, Enum):
    HEALTHY = "healthy"
    STARTING = "starting"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"


@dataclass(frozen=True)
class LegStatus:
    """What a leg on record is doing. ``pid`` is None when it does not run."""

    record: LegRecord
    phase: Phase
    pid: int | None
    detail: str
    last_line: str
    fatal: str | None
    """A line of its log after which it will never be healthy."""


def leg_statuses(state: DeploymentState) -> list[LegStatus]:
    """Of every leg on record."""
    records = state.records()
    running = processes.find(record.launch_id for record in records.values())
    return [_status(state, record, running[record.launch_id]) for record in records.values()]


def _status(state: DeploymentState, record: LegRecord, pids: list[int]) -> LegStatus:
    lines = tail(state.log(record.name))
    if not processes.alive(pids):
        return LegStatus(record, Phase.DEAD, None, error_line(lines), last_line(lines), None)
    problem = health_problem(record.url)
    phase = Phase.HEALTHY
    if problem:
        phase = Phase.STARTING if problem == NOT_LISTENING else Phase.UNHEALTHY
    fatal = fatal_line(lines) if problem else None
    return LegStatus(record, phase, pids[0], problem or "", last_line(lines), fatal)


def bring_up(
    deployment: Deployment,
    timeout: float,
    say: Say,
    watch: Callable[[list[LegStatus], float], None],
) -> None:
    """Start what does not run, restart what changed, wait for health.

    Args:
        timeout: seconds for each of the two stages, engines and router, to become healthy.
        say: called with every decision, one line each.
        watch: called with the legs' states and the seconds waited, while waiting.

    Raises:
        PdctlError: a leg did not come up; what this call started is stopped again.
    """
    state = DeploymentState(deployment.name)
    with state.lock():
        started: list[LegRecord] = []
        try:
            gone, wanted = _changes(deployment, state, say)
            # Before anything is stopped: what runs is not given up for what cannot start.
            check_addresses(wanted, own=[record.launch_id for record in gone])
            _stop(state, gone, None, say)
            for stage in (deployment.engines, (deployment.router,)):
                for leg in stage:
                    if leg in wanted:
                        say(f"{leg.name}: starting")
                        record = new_record(leg, deployment.bidirectional)
                        started.append(record)
                        start(state, leg, record)
                _wait(state, [leg.name for leg in stage], timeout, watch)
        except BaseException:
            if started:
                _quietly(say, f"stopping what was started: {', '.join(r.name for r in started)}")
                _stop(state, started, 10, say)
            raise


def _changes(
    deployment: Deployment, state: DeploymentState, say: Say
) -> tuple[list[LegRecord], list[Leg]]:
    """What has to be stopped, and what has to be started."""
    legs = {leg.name: leg for leg in deployment.legs}
    gone = []
    for status in leg_statuses(state):
        record, name = status.record, status.record.name
        if name not in legs:
            say(f"{name}: no longer in the spec, stopping it")
        elif status.phase is Phase.DEAD:
            say(f"{name}: does not run any more ({status.detail})")
        elif not state.holds(leg_files(legs[name])):
            say(f"{name}: changed in the spec, restarting it")
        elif status.detail.startswith(ANSWERS) and record.role != "router":
            # An engine that calls itself unhealthy stays so; the router waits for its legs.
            say(f"{name}: unhealthy ({status.detail}), restarting it")
        else:
            say(f"{name}: runs, unchanged")
            del legs[name]
            continue
        gone.append(record)
    return gone, list(legs.values())


def _wait(
    state: DeploymentState,
    names: list[str],
    timeout: float,
    watch: Callable[[list[LegStatus], float], None],
) -> None:
    begin = time.monotonic()
    while True:
        statuses = [status for status in leg_statuses(state) if status.record.name in names]
        waited = time.monotonic() - begin
        watch(statuses, waited)
        for status in statuses:
            if status.phase is Phase.DEAD:
                raise PdctlError(_ended(state, status))
            if status.fatal:
                raise PdctlError(
                    f"{status.record.name}: cannot start: {status.fatal}\n"
                    f"log: {state.log(status.record.name)}"
                )
        waiting = [status for status in statuses if status.phase is not Phase.HEALTHY]
        if not waiting:
            return
        if waited > timeout:
            status = waiting[0]
            raise PdctlError(
                f"{status.record.name}: not healthy after {timeout:g} s ({status.detail}); "
                f"its last line: {status.last_line}\n"
                f"log: {state.log(status.record.name)}; --timeout gives it longer"
            )
        time.sleep(_POLL_SECONDS)


def _ended(state: DeploymentState, status: LegStatus) -> str:
    return f"{status.record.name}: ended: {status.detail}\nlog: {state.log(status.record.name)}"


def take_down(state: DeploymentState, grace: float | None, say: Say) -> None:
    """Stop every leg on record.

    Args:
        grace: seconds for a leg to end by itself before it is killed; None: as many as it needs.

    Raises:
        PdctlError: something could not be stopped; it stays on record.
    """
    with state.lock():
        _stop(state, list(state.records().values()), grace, say)


def _stop(state: DeploymentState, records: list[LegRecord], grace: float | None, say: Say) -> None:
    """Stop legs and forget them, the router first: it still needs the engines for its drain."""
    for stage in (
        [record for record in records if record.role == "router"],
        [record for record in records if record.role != "router"],
    ):
        if stage:
            _stop_stage(state, stage, grace, say)


def _stop_stage(
    state: DeploymentState, records: list[LegRecord], grace: float | None, say: Say
) -> None:
    """A ``say`` that fails (its reader has gone) changes nothing."""
    if grace is None:
        grace = max(record.grace for record in records)
    names = ", ".join(record.name for record in records)
    _quietly(say, f"{names}: stopping, for at most {grace:g} s")
    left = processes.stop(
        [record.launch_id for record in records], grace, lambda line: _quietly(say, line)
    )
    if left:
        raise PdctlError(f"could not be stopped: pids {' '.join(map(str, left))}")
    for record in records:
        state.forget(record.name)
    for record in records:
        _quietly(say, f"{record.name}: stopped")


def _quietly(say: Say, line: str) -> None:
    # rich ends the program with SystemExit when its stream is a broken pipe.
    with contextlib.suppress(OSError, SystemExit):
        say(line)
