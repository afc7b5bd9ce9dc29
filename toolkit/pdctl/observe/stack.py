"""Spec -> the files of Prometheus, Alertmanager, Collector, Tempo and Grafana. Pure."""

import html
import importlib.resources
import json
from typing import Any

import yaml

from pd_connector import telemetry
from pd_connector.contract import Outcome
from pdctl.observe.alerts import rules
from pdctl.observe.conditions import JOB, Settings
from pdctl.observe.playbooks import pages
from pdctl.observe.promql import span
from pdctl.plan import Deployment
from pdctl.render import File, template
from pdctl.spec.model import Spec

FOLDER = "pdctl"
"""Grafana's folder of the dashboards."""
PROMETHEUS_UID, TEMPO_UID = "pdctl-prometheus", "pdctl-tempo"
IMAGES = {
    "prometheus": "prom/prometheus:v3.5.0",
    "alertmanager": "prom/alertmanager:v0.28.1",
    "tempo": "grafana/tempo:2.8.2",
    "collector": "otel/opentelemetry-collector-contrib:0.131.0",
    "grafana": "grafana/grafana:11.6.4",
}
TEMPO_PORT, TEMPO_GRPC_PORT, TEMPO_OTLP_PORT = 3200, 9095, 14317


def stack_files(spec: Spec, deployment: Deployment) -> list[File]:
    """Everything that watches a deployment, as files below one folder."""
    prometheus = [
        _file(f"prometheus/{name}", text) for name, text in prometheus_files(spec, deployment)
    ]
    return [
        *prometheus,
        _file("alertmanager/alertmanager.yml", alertmanager_config(spec, deployment)),
        _file("collector/config.yaml", _collector(spec, deployment)),
        _file("tempo/tempo.yaml", _render("tempo.yaml.j2", deployment, **_tempo_ports())),
        _file(
            "grafana/provisioning/datasources/pdctl.yaml",
            _render("datasources.yaml.j2", deployment, sources=data_sources(spec)),
        ),
        _file(
            "grafana/provisioning/dashboards/pdctl.yaml",
            _render("dashboards.yaml.j2", deployment, folder=FOLDER),
        ),
        *(
            _file(f"grafana/dashboards/{name}.json", _json(dashboard))
            for name, dashboard in dashboards(spec).items()
        ),
        _file("compose.yaml", _compose(spec, deployment)),
    ]


def prometheus_files(
    spec: Spec, deployment: Deployment, ca: str | None = None
) -> list[tuple[str, str]]:
    """Name and text of ``prometheus.yml``, the rules and the playbook pages.

    Args:
        ca: file of certificates to trust a router by that speaks TLS.
    """
    stack = spec.observability.stack
    config = _render(
        "prometheus.yml.j2",
        deployment,
        stack=stack,
        job=JOB,
        scrape_timeout=min(10.0, stack.scrape_interval),
        alertmanager=f"{bracketed(stack.host)}:{stack.alertmanager_port}",
        address=lambda leg: leg.url.partition("://")[2],
        ca=ca,
    )
    rule_text = yaml.safe_dump(
        rules(alert_settings(spec, deployment)), sort_keys=False, width=1000, allow_unicode=True
    )
    page = template("playbook.html.j2")
    return [
        ("prometheus.yml", config),
        ("rules.yml", rule_text),
        *(
            (f"consoles/{slug}.html", page.render(title=html.escape(title), body=body))
            for slug, title, body in pages()
        ),
    ]


def alertmanager_config(spec: Spec, deployment: Deployment) -> str:
    stack = spec.observability.stack
    return _render(
        "alertmanager.yml.j2",
        deployment,
        stack=stack,
        group_wait=min(30.0, stack.alert_window / 10),
    )


def prometheus_flags(spec: Spec, config: str, data: str) -> list[str]:
    """Prometheus' command line, without its name.

    Args:
        config, data: folders of its configuration and of its samples.
    """
    stack = spec.observability.stack
    return [
        f"--config.file={config}/prometheus.yml",
        f"--storage.tsdb.path={data}",
        "--storage.tsdb.retention.time=30d",
        "--enable-feature=exemplar-storage",
        # An alert that fires before Alertmanager is found (5 s after the start) is sent again.
        f"--rules.alert.resend-delay={span(min(60.0, stack.alert_window))}",
        f"--web.console.templates={config}/consoles",
        f"--web.console.libraries={config}/consoles",
        f"--web.listen-address={bracketed(stack.host)}:{stack.prometheus_port}",
        f"--web.external-url={prometheus_url(spec)}",
    ]


def alertmanager_flags(spec: Spec, config: str, data: str) -> list[str]:
    """Alertmanager's command line, without its name."""
    stack = spec.observability.stack
    return [
        f"--config.file={config}/alertmanager.yml",
        f"--storage.path={data}",
        f"--web.listen-address={bracketed(stack.host)}:{stack.alertmanager_port}",
        f"--web.external-url={alertmanager_url(spec)}",
        "--cluster.listen-address=",
    ]


def prometheus_url(spec: Spec) -> str:
    stack = spec.observability.stack
    return f"http://{_reached(stack.host)}:{stack.prometheus_port}"


def alertmanager_url(spec: Spec) -> str:
    stack = spec.observability.stack
    return f"http://{_reached(stack.host)}:{stack.alertmanager_port}"


def playbooks_url(spec: Spec) -> str:
    """URL below which the pages are: the spec's, or Prometheus itself."""
    return spec.observability.stack.playbooks_url or f"{prometheus_url(spec)}/consoles"


def alert_settings(spec: Spec, deployment: Deployment) -> Settings:
    stack = spec.observability.stack
    return Settings(
        window=stack.alert_window,
        ttft_slo=stack.ttft_slo,
        ttft_target=stack.ttft_target,
        playbooks=playbooks_url(spec),
        expected={
            "deployment": deployment.name,
            "bidirectional": "on" if deployment.bidirectional else "off",
            "provider": spec.fabric.provider or "",
            "connector": spec.kv_transfer.connector,
        },
    )


def dashboards(spec: Spec | None = None) -> dict[str, dict[str, Any]]:
    """The checked-in dashboards by uid; with a spec, its objective and playbooks in them."""
    folder = importlib.resources.files("pdctl.dashboards")
    found = {
        file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".json")
    }
    if spec is not None:
        constants = {
            "ttft_slo": str(float(spec.observability.stack.ttft_slo)),
            "playbooks": playbooks_url(spec),
        }
        for dashboard in found.values():
            for variable in dashboard["templating"]["list"]:
                if variable["name"] in constants:
                    variable["query"] = constants[variable["name"]]
    return found


def data_sources(spec: Spec) -> list[dict[str, Any]]:
    """Grafana's data sources: exemplars lead to traces, spans to the metrics around them."""
    name = telemetry.ROUTER_TTFT.name
    return [
        {
            "name": "pdctl Prometheus",
            "uid": PROMETHEUS_UID,
            "type": "prometheus",
            "access": "proxy",
            "url": prometheus_url(spec),
            "jsonData": {
                "timeInterval": span(spec.observability.stack.scrape_interval),
                "exemplarTraceIdDestinations": [
                    {"name": telemetry.EXEMPLAR_TRACE_ID, "datasourceUid": TEMPO_UID}
                ],
            },
        },
        {
            "name": "pdctl Tempo",
            "uid": TEMPO_UID,
            "type": "tempo",
            "access": "proxy",
            "url": f"http://127.0.0.1:{TEMPO_PORT}",
            "jsonData": {
                "tracesToMetrics": {
                    "datasourceUid": PROMETHEUS_UID,
                    "spanStartTimeShift": "-15m",
                    "spanEndTimeShift": "15m",
                    "tags": [{"key": telemetry.OUTCOME.name, "value": "outcome"}],
                    "queries": [
                        {
                            "name": "TTFT p99 of this outcome",
                            "query": "histogram_quantile(0.99, sum by (le) "
                            f"(rate({name}_bucket{{$__tags}}[5m])))",
                        },
                        {
                            "name": "Turns with this outcome",
                            "query": f"sum(rate({telemetry.ROUTER_TURNS.name}{{$__tags}}[5m]))",
                        },
                    ],
                },
                "nodeGraph": {"enabled": True},
            },
        },
    ]


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _reached(host: str) -> str:
    """A host to reach what listens on all addresses at."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, bracketed(host))


def _collector(spec: Spec, deployment: Deployment) -> str:
    stack = spec.observability.stack
    return _render(
        "collector.yaml.j2",
        deployment,
        stack=stack,
        listen=lambda port: f"{bracketed(stack.host)}:{port}",
        outcome_attribute=telemetry.OUTCOME.name,
        ttft_attribute=telemetry.TTFT_MS.name,
        kept_outcomes=[each.value for each in Outcome if each is not Outcome.HIT],
        **_tempo_ports(),
    )


def _compose(spec: Spec, deployment: Deployment) -> str:
    return _render(
        "compose.yaml.j2",
        deployment,
        stack=spec.observability.stack,
        images=IMAGES,
        prometheus_flags=lambda *folders: prometheus_flags(spec, *folders),
        alertmanager_flags=lambda *folders: alertmanager_flags(spec, *folders),
    )


def _tempo_ports() -> dict[str, int]:
    return {
        "tempo_port": TEMPO_PORT,
        "tempo_grpc_port": TEMPO_GRPC_PORT,
        "tempo_otlp_port": TEMPO_OTLP_PORT,
    }


def _render(name: str, deployment: Deployment, **values: Any) -> str:
    return template(name).render(deployment=deployment, span=span, **values)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _file(name: str, text: str) -> File:
    return File(name, text, executable=False)
