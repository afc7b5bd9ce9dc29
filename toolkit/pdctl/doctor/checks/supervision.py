"""What watches over legs and leads to them: probes, start-up limits, services, replicas."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import OUT_OF_MEMORY_KILL
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import (
    DEPLOYMENT,
    Answer,
    Category,
    Check,
    Excerpt,
    Finding,
    More,
    Pattern,
)

GIVEN_UP = Pattern(
    "given-up-while-starting",
    (
        "Timed out waiting for engine core",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "failed liveness probe",
        "failed startup probe",
        "Liveness probe failed",
        "Startup probe failed",
        "start operation timed out",
    ),
    r"(?i)(?P<limit>Timed out waiting for engine core|VLLM_ENGINE_READY_TIMEOUT_S)"
    r"|(?P<probe>(?:failed )?(?:liveness|startup) probe(?: failed)?)"
    r"|(?P<unit>start operation timed out)",
)
REFUSED = Pattern(
    "upstream-refused",
    ("onnection refused", "onnect error", "ConnectError", "onnection reset", "No route to host"),
    r"(?i)(?:refused|connect ?error|connection reset|no route to host)",
)
_KILLED = re.compile(r"(?i)will be restarted|Killing|Restart Count:\s*[1-9]|CrashLoopBackOff")
_TERMINATING = re.compile(r"(?m)^(?P<name>\S{1,100})\s.{0,100}\bTerminating\b(?P<rest>.{0,200})$")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_REPLICAS = re.compile(
    r"(?m)^(?P<name>\S{0,80}(?:router|proxy|gateway|epp)\S{0,80})\s+(?P<ready>\d{1,4})/\d{1,4}\s"
)
_SERVICE = re.compile(
    r"(?m)^(?P<name>\S{0,80}(?:prefill|decode|engine|worker)\S{0,80})\s+"
    r"(?P<type>LoadBalancer|NodePort)\s.{0,200}$"
)


def _given_up(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, GIVEN_UP)
    if not found:
        return
    if not found.counts("limit") and not found.counts("unit"):
        # A probe that fails now and then ends nothing.
        ended = [
            command
            for leg in evidence.legs
            for command in leg.commands
            if re.search(r"(?i)(?:liveness|startup) probe", command.output)
            and _KILLED.search(command.output)
        ]
        if not ended and not seen(evidence, GIVEN_UP).counts("probe").get("failed liveness probe"):
            return
    who = "a liveness or startup probe" if found.counts("probe") else "a limit on its start"
    yield Finding(
        found.leg,
        "certain" if found.counts("limit") or found.counts("unit") else "likely",
        found.excerpts,
        f"The leg is ended by {who} before it answers: loading weights, compiling and registering "
        "KV memory takes minutes, and a busy engine answers /health late. So it starts again and "
        "again.",
        "Give the start its time: a startupProbe on /health with failureThreshold * periodSeconds "
        "above the longest start seen, a livenessProbe that begins after it with timeoutSeconds "
        "of 10 or more, VLLM_ENGINE_READY_TIMEOUT_S above it too. Weights on local disk start "
        "faster.",
    )


def _going_away(evidence: Evidence) -> Iterator[Answer]:
    refused = [
        hit
        for leg in evidence.role("router", DEPLOYMENT, "client")
        if (hits := leg.hits.get(REFUSED.name))
        for hit in (*hits.first, *hits.last)
    ]
    for leg in evidence.legs:
        for command in leg.commands:
            for row in _TERMINATING.finditer(command.output):
                names = [row["name"], *_ADDRESS.findall(row["rest"])]
                hit = next((h for h in refused if any(name in h.text for name in names)), None)
                if hit:
                    yield Finding(
                        hit.leg,
                        "likely",
                        (hit.excerpt, Excerpt(command.source, row[0].strip())),
                        f"The router still sends turns to {row['name']}, which is being deleted: "
                        "it has stopped listening, and the router has not been told.",
                        "Take the leg out of the router first (drain), then delete it; give the "
                        "pod a preStop sleep longer than the router's health interval, and let "
                        "discovery leave out pods with a deletionTimestamp.",
                    )
                    return


def _replicas(evidence: Evidence) -> Iterator[Answer]:
    """Several routers behind a service without affinity, as the cluster lists them."""
    texts = [(leg, command) for leg in evidence.legs for command in leg.commands]
    loose = next((c for _, c in texts if re.search(r"(?i)sessionAffinity:\s*None", c.output)), None)
    shared = any(
        leg.config and re.search(r"(?i)redis|valkey|etcd", leg.config.text) for leg in evidence.legs
    )
    if not loose or shared:
        return
    for leg, command in texts:
        row = next((r for r in _REPLICAS.finditer(command.output) if int(r["ready"]) > 1), None)
        if row:
            yield Finding(
                leg.name,
                "likely",
                (
                    Excerpt(command.source, row[0].strip()),
                    Excerpt(loose.source, "sessionAffinity: None"),
                ),
                f"{row['ready']} router replicas stand behind a service that spreads connections, "
                "and nothing shows a store that they share: a turn that reaches another replica "
                "than the turn before finds no handle there.",
                "Share the store (pd-router with Redis), or pin conversations to a replica in "
                "front of them by session header.",
            )
            return


def _public_engine(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.legs:
        for command in leg.commands:
            for row in _SERVICE.finditer(command.output):
                if re.search(r"router|gateway|proxy", row["name"]):
                    continue
                yield Finding(
                    leg.name,
                    "likely",
                    (Excerpt(command.source, row[0].strip()),),
                    f"The service {row['name']} ({row['type']}) leads to an engine past the "
                    "router: whoever reaches it can send kv_transfer_params, and with them read "
                    "other conversations' blocks, pin blocks for ever, or end the engine.",
                    "Make the engines' services ClusterIP (or headless), allow their ports only "
                    "from the router and the other legs with a NetworkPolicy, and publish the "
                    "router alone.",
                )
                return


def _killed_for_memory(evidence: Evidence) -> Iterator[Answer]:
    killed = seen(evidence, OUT_OF_MEMORY_KILL)
    if killed:
        yield Finding(
            killed.leg,
            "certain",
            killed.excerpts,
            "The leg was killed for its use of host memory (exit code 137): the container's limit, "
            "or the node, is smaller than weights in the page cache, pinned buffers, /dev/shm and "
            "the workers together.",
            "Raise the memory limit above what the leg uses after an hour of load (kubectl top "
            "pod). If it grows without end, UCX's registration cache is the first suspect "
            "(pdctl runbook PD7002).",
        )


CHECKS = (
    Check(
        "PD8506",
        "The leg is ended before it has started",
        Category.LAUNCH_LIFECYCLE,
        "error",
        "ended-while-starting",
        _given_up,
        needs=("log|commands",),
        patterns=(GIVEN_UP,),
        explains=("PD8505", "PD8560"),
    ),
    Check(
        "PD8507",
        "Turns go to a leg that is going away",
        Category.LAUNCH_LIFECYCLE,
        "error",
        "turns-to-a-leaving-leg",
        _going_away,
        needs=("commands",),
        patterns=(REFUSED,),
        explains=("PD2005",),
    ),
)

MORE = (
    More("PD8505", _killed_for_memory, ("log", "commands"), (OUT_OF_MEMORY_KILL,)),
    More("PD5503", _replicas, ("commands",)),
    More("PD8003", _public_engine, ("commands",)),
)
