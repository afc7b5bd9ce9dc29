"""The alerts as Grafana evaluates them itself.

Fields as in Grafana's OpenAPI description of ``/api/v1/provisioning``: AlertRuleGroup,
ProvisionedAlertRule, AlertQuery.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

from pdctl.observe.alerts import ALERTS, Alert
from pdctl.observe.conditions import Settings
from pdctl.observe.promql import within

READ_ONLY = ("id", "updated", "provenance")
"""Fields of a rule that Grafana sets."""
_TICK = 10
"""Seconds: Grafana evaluates groups at multiples of it."""
_QUERY, _FIRES = "query", "fires"
_EXPRESSION = "__expr__"
"""Type and uid of the data source that computes with the answers of others."""
_LOOKBACK_SECONDS = 600
"""Grafana wants a time range, also of an instant query."""


@dataclass(frozen=True)
class Group:
    """The rules of one deployment; ``prefix`` is what their uids begin with, and no others."""

    title: str
    interval: int
    prefix: str
    rules: tuple[dict[str, Any], ...]


def rule_group(settings: Settings, deployment: str, source: str) -> Group:
    """The rules of a deployment, over its series alone.

    What its spec expects is in their conditions, so that they need no rule of the Prometheus.

    Args:
        source: uid of the Prometheus data source.
    """
    settings = replace(settings, recorded=False)
    prefix = f"pd-{_digest(deployment)}-"
    rules = tuple(
        _rule(alert, settings, deployment, source, prefix)
        for alert in ALERTS
        if alert.applies(settings.expected or {})
    )
    interval = math.ceil(settings.interval / _TICK) * _TICK
    return Group(f"pdctl-{deployment}", interval, prefix, rules)


def _rule(
    alert: Alert, settings: Settings, deployment: str, source: str, prefix: str
) -> dict[str, Any]:
    rule = alert.rule(settings)
    return {
        "uid": f"{prefix}{_digest(alert.name)}",
        # Unique within its folder, where other deployments have theirs.
        "title": f"{alert.name} ({deployment})",
        "condition": _FIRES,
        "data": [
            _query(within(rule["expr"], "deployment", deployment), source),
            _any_answer(),
        ],
        # No answer is how a condition says that all is well; an error is none.
        "noDataState": "OK",
        "execErrState": "Error",
        "for": rule["for"],
        "labels": rule["labels"],
        "annotations": {
            name: text.replace("$value", f"$values.{_QUERY}.Value")
            for name, text in rule["annotations"].items()
        },
    }


def _query(expr: str, source: str) -> dict[str, Any]:
    return {
        "refId": _QUERY,
        "queryType": "",
        "relativeTimeRange": {"from": _LOOKBACK_SECONDS, "to": 0},
        "datasourceUid": source,
        "model": {
            "refId": _QUERY,
            "datasource": {"type": "prometheus", "uid": source},
            "editorMode": "code",
            "expr": expr,
            "instant": True,
            "range": False,
        },
    }


def _any_answer() -> dict[str, Any]:
    """Whatever the query returns fires, as with Prometheus: also a value of 0."""
    return {
        "refId": _FIRES,
        "queryType": "",
        "relativeTimeRange": {"from": 0, "to": 0},
        "datasourceUid": _EXPRESSION,
        "model": {
            "refId": _FIRES,
            "datasource": {"type": _EXPRESSION, "uid": _EXPRESSION},
            "type": "math",
            "expression": f"is_number(${_QUERY}) || is_inf(${_QUERY})",
        },
    }


def _digest(text: str) -> str:
    """Part of a uid, which may have 40 characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
