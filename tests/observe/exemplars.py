"""Exemplars that a Prometheus holds."""

from pd_connector import telemetry
from pdctl.observe.prometheus import Prometheus


def bucket_traces(prometheus: Prometheus) -> set[str]:
    """Ids of the traces that buckets of the router's TTFT lead to."""
    found = prometheus.exemplars(f"{telemetry.ROUTER_TTFT.name}_bucket", 0, 4e9)
    return {
        exemplar["labels"][telemetry.EXEMPLAR_TRACE_ID]
        for series in found
        for exemplar in series["exemplars"]
    }
