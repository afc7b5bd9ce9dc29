"""The alert rules: one table, rendered for a deployment's windows and objectives.

Ratios are looked at over two windows, so that a short burst does not page and an ended trouble
stops to: the short one is :attr:`Settings.window`, the long one twelve times as long.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome
from pdctl.observe.promql import increase, select, span, total

JOB = "pdctl"
"""Name of the scrape job of all legs."""
EXPECTED = "pd_expected_info"
"""Recorded by a deployment's own rules: 1, with what its spec says as labels."""

PREFILL, DECODE = 'role="prefill"', 'role="decode"'
ENGINES = 'role=~"prefill|decode"'
WITH_HANDLE = f'outcome!~"{Outcome.MISS.value}|{Outcome.DISABLED.value}"'
REMOTE = f'source="{contract.SOURCE_EXTERNAL_KV}"'
DEFAULT_PLAYBOOKS = "http://127.0.0.1:9090/consoles"


@dataclass(frozen=True)
class Settings:
    """What a spec says about alerts.

    Attributes:
        window: seconds of the short window.
        ttft_slo: seconds; a bucket of the TTFT histogram.
        ttft_target: share of streamed turns that must have their first event within ``ttft_slo``.
        playbooks: URL below which the pages ``SLUG.html`` are.
        expected: labels of :data:`EXPECTED`; None where no deployment is known.
    """

    window: float = 300.0
    ttft_slo: float = 2.5
    ttft_target: float = 0.95
    playbooks: str = DEFAULT_PLAYBOOKS
    expected: dict[str, str] | None = field(default=None)

    @property
    def short(self) -> str:
        return span(self.window)

    @property
    def long(self) -> str:
        return span(self.window * 12)


@dataclass(frozen=True)
class Alert:
    """One alert.

    Attributes:
        summary: one line with the values, in Prometheus' template language.
        holds: for how many short windows the condition must hold.
        slug: its playbook page is ``PD####-SLUG.md``.
        expr: the condition, for given settings.
    """

    name: str
    severity: Literal["critical", "warning"]
    summary: str
    expr: Callable[[Settings], str]
    slug: str
    holds: float = 1.0

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
    interval = span(min(settings.window / 5, 30.0))
    if settings.expected is not None:
        record = {"record": EXPECTED, "expr": "vector(1)", "labels": settings.expected}
        groups.append({"name": "pdctl-expected", "interval": interval, "rules": [record]})
    alerts = [alert.rule(settings) for alert in ALERTS]
    groups.append({"name": "pdctl-alerts", "interval": interval, "rules": alerts})
    return {"groups": groups}


def slug_of(name: str) -> str:
    """The playbook of an alert.

    Raises:
        KeyError: there is no such alert.
    """
    return {alert.name: alert.slug for alert in ALERTS}[name]


def _reuse_stopped(s: Settings) -> str:
    sent = increase(telemetry.ROUTER_HANDLES_SENT.name, s.short)
    read = increase(contract.ENGINE_PROMPT_TOKENS_BY_SOURCE, s.short, PREFILL, REMOTE)
    return f"({sent} > 2)\nunless on (deployment) ({read} > 0)"


def _share(s: Settings, part: str, whole: str, limit: float) -> str:
    """A share of turns above a limit in both windows."""

    def over(window: str) -> str:
        turns = telemetry.ROUTER_TURNS.name
        matchers = [whole] if whole else []
        return (
            f"({increase(turns, window, part)} / {increase(turns, window, *matchers)} > {limit:g})"
        )

    return f"{over(s.short)}\nand {over(s.long)}"


def _always_miss(s: Settings) -> str:
    share = _share(s, f'outcome="{Outcome.MISS.value}"', "", 0.95)
    turns = increase(telemetry.ROUTER_TURNS.name, s.long)
    on = select(telemetry.ROUTER_INFO.name, 'bidirectional="on"')
    return f"{share}\nand ({turns} > 20)\nand on (deployment) {on}"


def _expire(s: Settings) -> str:
    return _share(s, f'outcome="{Outcome.EXPIRED.value}"', WITH_HANDLE, 0.05)


def _transfer_failures(s: Settings) -> str:
    def over(window: str) -> str:
        failed = increase(contract.ENGINE_NIXL_FAILED, window)
        good = increase(contract.ENGINE_NIXL_TRANSFERS, window)
        return f"({failed} / ({failed} + {good}) > 0.01)"

    return f"{over(s.short)}\nand {over(s.long)}"


def _provider(s: Settings) -> str:
    info = telemetry.ENGINE_INFO.name
    return (
        f'({info} and on (deployment) {EXPECTED}{{provider!=""}})\n'
        f"unless on (deployment, provider) {EXPECTED}"
    )


def _bidirectional(s: Settings) -> str:
    names = f"{telemetry.ENGINE_INFO.name}|{telemetry.ROUTER_INFO.name}|{EXPECTED}"
    values = f'group by (deployment, bidirectional) ({{__name__=~"{names}"}})'
    return f"count by (deployment) ({values}) > 1"


def _pinned(limit: float) -> Callable[[Settings], str]:
    def expr(s: Settings) -> str:
        pinned = total(telemetry.ENGINE_PINNED_BLOCKS.name, DECODE, by="deployment, leg")
        blocks = total(telemetry.ENGINE_BLOCKS.name, DECODE, by="deployment, leg")
        return f"{pinned} / {blocks} > {limit:g}"

    return expr


def _slow_share(s: Settings, window: str) -> str:
    name = telemetry.ROUTER_TTFT.name
    within = increase(f"{name}_bucket", window, f'le="{float(s.ttft_slo)}"')
    return f"1 - {within} / {increase(f'{name}_count', window)}"


def _ttft(burn: float, short: float, long: float) -> Callable[[Settings], str]:
    """The error budget burns ``burn`` times as fast as it may; windows count short windows."""

    def expr(s: Settings) -> str:
        limit = min(burn * (1 - s.ttft_target), 0.99)
        first, second = (_slow_share(s, span(s.window * count)) for count in (short, long))
        return f"({first} > {limit:.6g})\nand ({second} > {limit:.6g})"

    return expr


def _map_full(s: Settings) -> str:
    held = total(telemetry.ROUTER_HANDLES_HELD.name, by="deployment, instance")
    limit = total(telemetry.ROUTER_HANDLES_LIMIT.name, by="deployment, instance")
    return f"{held} / {limit} > 0.9"


def _silent_connector(s: Settings) -> str:
    return (
        f'(up{{job="{JOB}",{ENGINES}}} == 1)\n'
        f'and on (deployment) {EXPECTED}{{connector="pdctl"}}\n'
        f"unless on (deployment, leg) {telemetry.ENGINE_INFO.name}"
    )


def _alerts() -> Iterator[Alert]:
    here = "{{ $labels.deployment }}"
    share = "{{ $value | humanizePercentage }}"
    yield Alert(
        "PdReuseStopped",
        "critical",
        f"{here}: the router sent {{{{ $value | humanize }}}} handles, and prefill read no "
        "token back from decode",
        _reuse_stopped,
        "reuse-silently-stopped",
    )
    yield Alert(
        "PdAlwaysMiss",
        "warning",
        f"{here}: {share} of turns had no handle (outcome miss) although bidirectional "
        "transfer is on",
        _always_miss,
        "always-miss",
    )
    yield Alert(
        "PdHandlesExpire",
        "warning",
        f"{here}: {share} of the turns that had a handle came too late for decode's blocks",
        _expire,
        "expired-remote-read",
    )
    yield Alert(
        "PdTransferFailures",
        "critical",
        f"{here}: {share} of NIXL transfers fail",
        _transfer_failures,
        "transfer-failures",
    )
    yield Alert(
        "PdProviderFallback",
        "critical",
        f"{here}: {{{{ $labels.leg }}}} moves KV over provider "
        "'{{ $labels.provider }}', not over the one that the spec names",
        _provider,
        "provider-fallback",
    )
    yield Alert(
        "PdBidirectionalDisagree",
        "critical",
        f"{here}: its legs disagree on bidirectional transfer ({{{{ $value }}}} settings)",
        _bidirectional,
        "bidirectional-disagree",
    )
    yield Alert(
        "PdPinnedKvHigh",
        "warning",
        f"{here}: finished turns hold {share} of the KV blocks of {{{{ $labels.leg }}}}",
        _pinned(0.8),
        "pinned-kv-near-full",
    )
    yield Alert(
        "PdPinnedKvFull",
        "critical",
        f"{here}: finished turns hold {share} of the KV blocks of {{{{ $labels.leg }}}}",
        _pinned(0.95),
        "pinned-kv-near-full",
        0.2,
    )
    yield Alert(
        "PdTtftBurnsFast",
        "critical",
        f"{here}: {share} of streamed turns miss the TTFT objective; the budget of a month is "
        "gone in about two days",
        _ttft(14.4, 1, 12),
        "ttft-objective",
        0.4,
    )
    yield Alert(
        "PdTtftBurnsSlowly",
        "warning",
        f"{here}: {share} of streamed turns miss the TTFT objective; the budget of a month is "
        "gone in about five days",
        _ttft(6, 6, 72),
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
        _map_full,
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
        _silent_connector,
        "connector-silent",
    )


ALERTS: tuple[Alert, ...] = tuple(_alerts())
