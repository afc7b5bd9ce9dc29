"""docs/telemetry.md, written from the records of telemetry.py."""

from collections.abc import Iterable, Iterator

from pd_connector import contract, telemetry
from pd_connector.telemetry import METRICS, PROMPT_BANDS, SPANS, TURN_BANDS, Metric

_USED_OF_VLLM = {
    contract.ENGINE_PROMPT_TOKENS_BY_SOURCE: "where prompt tokens came from (label `source`)",
    contract.ENGINE_NIXL_BYTES: "bytes of NIXL transfers",
    contract.ENGINE_NIXL_TRANSFERS: "NIXL transfers that succeeded",
    contract.ENGINE_NIXL_FAILED: "NIXL transfers that failed",
    contract.ENGINE_NIXL_EXPIRED: "requests whose blocks expired, read or not",
    contract.ENGINE_KV_USAGE: "share of the KV cache in use",
    contract.ENGINE_RUNNING: "requests that run",
    contract.ENGINE_WAITING_BY_REASON: "requests that wait (label `reason`)",
    contract.ENGINE_PREEMPTIONS: "requests that lost their KV to others",
    contract.ENGINE_QUEUE_SECONDS: "seconds that a request waited in the engine",
    contract.ENGINE_GENERATION_TOKENS: "tokens generated",
}
_TREE = f"""\
{telemetry.SPAN_TURN.name}                       router
  {telemetry.SPAN_CLAIM.name}                    router
  {telemetry.SPAN_PREFILL.name}                  router
    {telemetry.SPAN_DECISION.name}               prefill
    {telemetry.SPAN_TRANSFER.name} (d2p)         prefill
    llm_request               prefill, vLLM's own
  {telemetry.SPAN_DECODE.name}                   router
    {telemetry.SPAN_TRANSFER.name} (p2d)         decode
    llm_request               decode, vLLM's own
  {telemetry.SPAN_FIRST_TOKEN.name}       router
"""
_CONVENTIONS = (
    (
        "`gen_ai.operation.name`, `gen_ai.request.model`, `gen_ai.usage.input_tokens`, "
        "`gen_ai.conversation.id`",
        f"on `{telemetry.SPAN_TURN.name}`, set by the router",
    ),
    ("`gen_ai.latency.*`, `gen_ai.usage.*`, `gen_ai.request.*`", "on `llm_request`, set by vLLM"),
    (
        "`gen_ai.server.time_to_first_token`",
        f"the Prometheus histogram `{telemetry.ROUTER_TTFT.name}`"
        " is the same quantity, with labels that the convention does not have",
    ),
    ("`service.name`, `service.instance.id`", "on every resource"),
    (
        f"`{telemetry.RESOURCE_LEG.name}`, `{telemetry.RESOURCE_DEPLOYMENT.name}` (ours)",
        "on the resources of engine legs, vLLM's own spans included",
    ),
)


def page() -> str:
    """The whole document."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Telemetry"
    yield ""
    yield (
        "Every metric, span and attribute of pdctl. Written by `pdctl observe names` from "
        "`connector/pd_connector/telemetry.py`; change that file, not this one."
    )
    yield ""
    yield (
        "Prometheus adds the labels `deployment`, `model`, `role`, `leg` and `instance` to what it "
        "scrapes with the configuration of `pdctl observe render`. Where a metric has a label "
        "`leg` or `role` of its own, that one stays: it is the leg that the router tells of."
    )
    yield ""
    yield from _metrics("Router", "pd_router_", "On the router's `/metrics`.")
    yield from _metrics(
        "Engines",
        "pd_engine_",
        "Added by pdctl's connector to an engine's `/metrics`; a stock connector has none of them.",
    )
    yield "## Engines: vLLM's own metrics that dashboards and alerts use"
    yield ""
    yield from _table(
        ("metric", "what"), ((f"`{name}`", text) for name, text in _USED_OF_VLLM.items())
    )
    yield "## Values of labels"
    yield ""
    yield from _table(
        ("label", "values"),
        (
            ("`outcome`", _words(each.value for each in contract.Outcome)),
            ("`route`", _words(each.value for each in contract.Route)),
            ("`turn`", _words(TURN_BANDS)),
            ("`prompt`", f"{_words(map(str, PROMPT_BANDS))}, `inf`: upper bound in tokens"),
            ("`direction`", "`d2p` (readback), `p2d`"),
        ),
    )
    yield "## Spans"
    yield ""
    yield "One trace per turn, across router, prefill and decode:"
    yield ""
    yield "```text"
    yield _TREE + "```"
    yield ""
    for span in SPANS:
        parent = f", child of {span.parent}" if span.parent else ""
        yield f"### `{span.name}`{parent}"
        yield ""
        yield span.text
        yield ""
        yield from _table(
            ("attribute", "type", "what"),
            ((f"`{each.name}`", each.type, each.text) for each in span.attributes),
        )
    yield f'A decision whose outcome is `expired` has an event "{telemetry.EVENT_DECLINED}".'
    yield ""
    yield "## OpenTelemetry's conventions for generative AI"
    yield ""
    yield "Their status is Development. Names of our own are below `pd.`."
    yield ""
    yield from _table(("name", "where"), _CONVENTIONS)
    yield "## Exemplars"
    yield ""
    yield (
        f"Buckets of `{telemetry.ROUTER_TTFT.name}` and `{telemetry.ROUTER_PREFILL.name}` carry "
        f"the trace of a turn in the label `{telemetry.EXEMPLAR_TRACE_ID}` when the router "
        "exports spans and Prometheus asks for OpenMetrics."
    )


def _metrics(title: str, prefix: str, text: str) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield text
    yield ""
    yield from _table(
        ("metric", "kind", "labels", "what", "buckets"),
        (
            (
                f"`{metric.name}`",
                metric.kind,
                _words(metric.labels),
                metric.text,
                _buckets(metric),
            )
            for metric in METRICS
            if metric.name.startswith(prefix)
        ),
    )


def _buckets(metric: Metric) -> str:
    return ", ".join(f"{bound:g}" if bound < 1e6 else f"{int(bound)}" for bound in metric.buckets)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _words(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)
