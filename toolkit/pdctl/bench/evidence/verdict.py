"""Whether a run carries a comparison: what has to hold, checked one by one. Pure.

No data is not ok: what nobody could tell makes the comparison invalid like what is wrong.
"""

from pd_connector.contract import Route
from pdctl.bench.evidence.caches import cold
from pdctl.bench.evidence.check import Check, expects_readback
from pdctl.bench.evidence.load import complete, equal_load, errors, legs_agree, samples
from pdctl.bench.evidence.outputs import outputs
from pdctl.bench.evidence.transfer import appended, not_transferred, transferred
from pdctl.bench.records import Run


def evidence(run: Run) -> list[Check]:
    """Every check that applies to the run's arms."""
    if len(run.arms) < 2:
        return [legs_agree(run), cold(run), errors(run)]
    return [
        complete(run),
        equal_load(run),
        legs_agree(run),
        *(transferred(run, arm) for arm in run.arms if expects_readback(arm) is True),
        *(not_transferred(run, arm) for arm in run.arms if expects_readback(arm) is False),
        *(appended(run, arm) for arm in run.arms if arm.get("route") == Route.APPEND.value),
        cold(run),
        errors(run),
        *outputs(run),
        samples(run),
    ]


def problems(checks: list[Check]) -> list[str]:
    """Why the comparison does not hold; empty when it does."""
    return [f"{check.name}: {check.detail}" for check in checks if not check.ok]
