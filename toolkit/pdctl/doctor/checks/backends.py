"""NIXL's backends when nothing names why they fail."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.lines import BACKEND_ERROR
from pdctl.doctor.checks.reading import any_seen
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Finding, Pattern

BACKEND_FAILED = Pattern(
    "backend-failed",
    ("backend creation failed", "registration failed for", "Failed to create engine"),
)


def _failed(evidence: Evidence) -> Iterator[Answer]:
    found = any_seen(evidence, (BACKEND_FAILED, BACKEND_ERROR))
    if found:
        yield Finding(
            found.leg,
            "possible",
            found.excerpts,
            "NIXL cannot create its backend or register memory with it; the evidence does not "
            "name the cause. The line of UCX or libfabric above the first of these does.",
            "Start the leg once with NIXL_LOG_LEVEL=INFO UCX_LOG_LEVEL=info FI_LOG_LEVEL=warn and "
            "collect again. Check devices (ls /dev/infiniband, ucx_info -d, fi_info -p efa), "
            "ulimit -l and the peer memory module.",
        )


CHECKS = (
    Check(
        "PD1015",
        "A NIXL backend fails",
        Category.EFA_FABRIC,
        "error",
        "nixl-backend-fails",
        _failed,
        needs=("log|commands",),
        patterns=(BACKEND_FAILED, BACKEND_ERROR),
        explains=("PD8505", "PD2009"),
    ),
)
