"""Which fabric the legs really use."""

from collections.abc import Iterator

from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Finding, Pattern

TCP_RAIL = Pattern(
    "tcp-provider-selected",
    ("Selected Provider is", "Selected provider is"),
    r"[Ss]elected [Pp]rovider is (?P<provider>tcp|sockets)\b",
)


def _provider_is_tcp(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.legs:
        hits = leg.hits.get(TCP_RAIL.name)
        if hits:
            yield Finding(
                leg.name,
                "certain",
                hits.excerpts,
                f"libfabric chose the provider {hits.value('provider')}: it sees no EFA device.",
                "Give the leg its EFA devices and set FI_PROVIDER=efa, so that their absence is "
                "an error.",
            )


CHECKS = (
    Check(
        code="PD1004",
        title="libfabric fell back to tcp",
        category=Category.EFA_FABRIC,
        severity="error",
        playbook="provider-is-tcp",
        needs=("log",),
        patterns=(TCP_RAIL,),
        run=_provider_is_tcp,
    ),
)
