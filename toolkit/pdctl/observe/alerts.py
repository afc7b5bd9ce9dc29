"""The alert rules: one table, rendered for a deployment."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pd_connector import telemetry
from pdctl.observe.conditions import (
    EXPECTED,
    JOB,
    Settings,
    always_miss,
    crowded_out,
    disagree,
    handles_expire,
    map_full,
    other_provider,
    pinned_share,
    reuse_stopped,
    silent_connector,
    transfer_failures,
    ttft_burns,
)
from pdctl.observe.promql import span


@dataclass(frozen=True)
class Alert:
    """One alert.

    Attributes:
        summary: one line with the values, in Prometheus' template language.
        holds: for how many short windows the condition must hold.
        slug: its playbook page is ``PD####-SLUG.md``.
        expr: the condition, for given settings.
        applies: whether a deployment of which this is expected can have the alert at all.
    """

    name: str
    severity: Literal["critical", "warning"]
    summary: str
    expr: Callable[[Settings], str]
    slug: str
    holds: float = 1.0
    applies: Callable[[Mapping[str, str]], bool] = lambda expected: True

    def rule(self, settings: Settings) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr(settings),
            "for": span(self.holds * settings.window),
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "runbook_url": playbook_url(settings.playbooks, self.slug),
            },
        }


def playbook_url(base: str, slug: str) -> str:
    return f"{base.rstrip('/')}/{slug}.html"


def rules(settings: Settings) -> dict[str, Any]:
    """A Prometheus rule file: the alerts, and what the deployment is expected to be."""
    groups: list[dict[str, Any]] = []
    interval = span(settings.interval)
    if settings.expected is not None:
        record = {"record": EXPECTED, "expr": "vector(1)", "labels": settings.expected}
        groups.append({"name": "pdctl-expected", "interval": interval, "rules": [record]})
    alerts = [alert.rule(settings) for alert in ALERTS]
    groups.append({"name": "pdctl-alerts", "interval": interval, "rules": alerts})
    return {"groups": groups}


def slug_of(name: str) -> str:
    """The playbook of an alert; another name is a page's own."""
    return {alert.name: alert.slug for alert in ALERTS}.get(name, name)


def _alerts() -> Iterator[Alert]:
    here = "{{ $labels.deployment }}"
    share = "{{ $value | humanizePercentage }}"
    yield Alert(
        "PdReuseStopped",
        "critical",
        f"{here}: the router sent {{{{ $value | humanize }}}} handles, and prefill read no "
        "token back from decode",
        reuse_stopped,
        "reuse-silently-stopped",
    )
    yield Alert(
        "PdAlwaysMiss",
        "warning",
        f"{here}: {share} of turns had no handle (outcome miss) although bidirectional "
        "transfer is on",
        always_miss,
        "always-miss",
    )
    yield Alert(
        "PdHandlesExpire",
        "warning",
        f"{here}: {share} of the turns that had a handle came too late for decode's blocks",
        handles_expire,
        "expired-remote-read",
    )
    yield Alert(
        "PdTransferFailures",
        "critical",
        f"{here}: {share} of NIXL transfers fail",
        transfer_failures,
        "transfer-failures",
    )
    yield Alert(
        "PdProviderFallback",
        "critical",
        f"{here}: {{{{ $labels.leg }}}} moves KV over provider "
        "'{{ $labels.provider }}', not over the one that the spec names",
        other_provider,
        "provider-fallback",
        applies=lambda expected: bool(expected.get("provider")),
    )
    yield Alert(
        "PdBidirectionalDisagree",
        "critical",
        f"{here}: its legs disagree on bidirectional transfer ({{{{ $value }}}} settings)",
        disagree,
        "bidirectional-disagree",
    )
    yield Alert(
        "PdPinnedKvHigh",
        "warning",
        f"{here}: finished turns hold {share} of the KV blocks of {{{{ $labels.leg }}}}",
        pinned_share(0.8),
        "pinned-kv-near-full",
    )
    yield Alert(
        "PdPinnedKvFull",
        "critical",
        f"{here}: finished turns hold {share} of the KV blocks of {{{{ $labels.leg }}}}",
        pinned_share(0.95),
        "pinned-kv-near-full",
        0.2,
    )
    yield Alert(
        "PdPinnedTurnsCrowdedOut",
        "warning",
        f"{here}: {{{{ $labels.leg }}}} freed {share} of finished turns' blocks for want of "
        "memory, before anybody came back for them",
        crowded_out,
        "pinned-kv-near-full",
    )
    yield Alert(
        "PdTtftBurnsFast",
        "critical",
        f"{here}: {share} of streamed turns miss the TTFT objective, by far more than it allows",
        ttft_burns(14.4, 1, 12),
        "ttft-objective",
        0.4,
    )
    yield Alert(
        "PdTtftBurnsSlowly",
        "warning",
        f"{here}: {share} of streamed turns have missed the TTFT objective for hours",
        ttft_burns(6, 6, 72),
        "ttft-objective",
        3,
    )
    yield Alert(
        "PdPairUnhealthy",
        "critical",
        f"{here}: transfers between {{{{ $labels.prefill_leg }}}} and "
        "{{ $labels.decode_leg }} do not work",
        lambda s: f"{telemetry.ROUTER_PAIR_UP.name} == 0",
        "pair-unhealthy",
    )
    yield Alert(
        "PdLegDown",
        "critical",
        f"{here}: {{{{ $labels.leg }}}} does not answer the router",
        lambda s: f"{telemetry.ROUTER_LEG_UP.name} == 0",
        "leg-down",
        0.4,
    )
    yield Alert(
        "PdRouterMapNearBound",
        "warning",
        f"{here}: the router's map of handles is {share} full; the oldest are about to be dropped",
        map_full,
        "router-map-near-bound",
    )
    yield Alert(
        "PdScrapeMissing",
        "critical",
        f"{here}: Prometheus gets no metrics from {{{{ $labels.leg }}}} at "
        "{{ $labels.instance }}",
        lambda s: f'up{{job="{JOB}"}} == 0',
        "scrape-missing",
    )
    yield Alert(
        "PdConnectorSilent",
        "warning",
        f"{here}: {{{{ $labels.leg }}}} answers but has no pd_engine metrics: pdctl's connector "
        "is not at work there",
        silent_connector,
        "connector-silent",
        applies=lambda expected: expected.get("connector") == "pdctl",
    )


ALERTS: tuple[Alert, ...] = tuple(_alerts())
