"""Several runs as one, arm beside arm."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdctl.bench.records import SCHEMA, Run, load_run
from pdctl.bench.upstream import read_stats
from pdctl.errors import PdctlError


def one_run(folders: Sequence[Path]) -> Run:
    """The run of a folder, or of several whose arms have names of their own. A file stands for a
    run of one arm with its name, as vLLM's multi-turn benchmark wrote it.

    What each arm was offered stays beside it, so that unequal loads are found.

    Raises:
        PdctlError: a folder holds no run, or two have an arm of the same name.
    """
    runs = [run_of_stats(path) if path.is_file() else load_run(path) for path in folders]
    if len(runs) == 1:
        return in_common(runs[0])
    arms: list[dict[str, Any]] = []
    for run in runs:
        for arm in run.arms:
            if arm["name"] in {each["name"] for each in arms}:
                raise PdctlError(f"{run.folder}: an arm {arm['name']!r} is in another run too", 2)
            arms.append(arm | {"offered": _offered(run)})
    states = {str(run.settings.get("state")) for run in runs}
    state = states.pop() if len(states) == 1 else ", ".join(sorted(states))
    first = runs[0]
    return dataclasses.replace(
        first,
        settings=first.settings | {"arms": arms, "state": state},
        rows=[row for run in runs for row in run.rows],
        blocks=[block for run in runs for block in run.blocks],
        transfers=[transfer for run in runs for transfer in run.transfers],
    )


def run_of_stats(path: Path) -> Run:
    """A run out of a statistics file alone: its turns, and nothing that could prove anything.

    Raises:
        PdctlError: it is no such file (exit code 2).
    """
    rows = read_stats(path, path.stem)
    conversations = len({row.conversation for row in rows})
    workload = {
        "kind": "multi-turn statistics",
        "conversations": conversations,
        "turns": len(rows),
        "load": {"concurrency": None, "rate": None},
    }
    settings = {
        "schema": SCHEMA,
        "state": "complete",
        "spec": None,
        "arms": [{"name": path.stem}],
        "repeats": 1,
        "seed": None,
        "workload": workload,
    }
    return Run(path, settings, rows, [], [], {})


def in_common(run: Run) -> Run:
    """A run that stopped at its deadline, without the repeats that not every arm came to."""
    if run.settings.get("state") != "deadline":
        return run
    done = [{block.repeat for block in run.arm_blocks(arm["name"])} for arm in run.arms]
    common = set.intersection(*done) if done else set()
    return dataclasses.replace(
        run,
        rows=[row for row in run.rows if row.repeat in common],
        blocks=[block for block in run.blocks if block.repeat in common],
    )


def _offered(run: Run) -> dict[str, Any]:
    workload = run.settings["workload"]
    return {
        "kind": workload["kind"],
        "turns": workload["turns"],
        "shared_tokens": workload.get("shared_tokens"),
        **workload["load"],
        "seed": run.settings["seed"],
    }
