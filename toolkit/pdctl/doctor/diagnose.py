"""From a spec or a bundle to a diagnosis."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pdctl.doctor.evidence import live
from pdctl.doctor.evidence.bundle import read_bundles
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.evidence.probe import hold_probe
from pdctl.doctor.model import Check
from pdctl.doctor.run import Diagnosis, diagnose, patterns
from pdctl.plan import Deployment
from pdctl.spec.model import Spec

Say = Callable[[str], None]


def of_bundles(
    paths: Sequence[Path], checks: Sequence[Check], say: Say, spec: Spec | None = None
) -> Diagnosis:
    """What the checks say of the evidence in bundles, one or one per node.

    Args:
        spec: taken when the bundles hold none.

    Raises:
        PdctlError: a bundle cannot be read (code 2).
    """
    evidence = read_bundles(paths, patterns(checks), progress=lambda log: say(f"reading {log}"))
    return diagnose(_with(evidence, spec), checks)


def of_deployment(
    deployment: Deployment,
    spec: Spec,
    spec_text: str,
    checks: Sequence[Check],
    say: Say,
    probe: bool,
) -> Diagnosis:
    """What the checks say of a deployment as it is now.

    Raises:
        PdctlError: the state folder cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="pdctl-doctor-") as folder:
        root = Path(folder)
        if probe:
            say("holding two probe turns")
            hold_probe(deployment, root)
        collected = live.collect(deployment, spec_text, root, say)
        evidence = read_bundles(
            [root], patterns(checks), collected.logs, lambda log: say(f"reading {log}")
        )
    evidence.plan = deployment
    return diagnose(_with(evidence, spec), checks)


def preflight(
    deployment: Deployment, spec: Spec, spec_text: str, checks: Sequence[Check]
) -> Diagnosis:
    """What the cheap checks say of a spec and this node, before anything is started."""
    with tempfile.TemporaryDirectory(prefix="pdctl-preflight-") as folder:
        root = Path(folder)
        live.collect_planned(deployment, spec_text, root)
        cheap = [check for check in checks if check.cheap]
        evidence = read_bundles([root], [])
    evidence.plan = deployment
    return diagnose(_with(evidence, spec), cheap)


def _with(evidence: Evidence, spec: Spec | None) -> Evidence:
    # The given one: what is in a bundle has lost its secrets and how numbers were written.
    evidence.spec = spec or evidence.spec
    return evidence
