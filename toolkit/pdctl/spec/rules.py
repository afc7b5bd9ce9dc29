"""Rules between fields of a spec: each says where, what is wrong and what to do."""

import re
from collections.abc import Iterator

from pd_connector.contract import READ_MARGIN_SECONDS
from pd_connector.telemetry import SECONDS
from pdctl.spec.faults import Broken, Where, shown
from pdctl.spec.model import Spec
from pdctl.spec.rules_legs import broken_between_legs
from pdctl.spec.rules_owned import broken_by_owned
from pdctl.spec.stand_ins import MAX_MODEL_LEN
from pdctl.spec.units import GIB, format_duration
from pdctl.spec.versions import CROSS_LAYER_KEY_UNTIL, OLDEST_VLLM, version, vllm_version


def broken_rules(spec: Spec) -> Iterator[Broken]:
    """Everything that single fields cannot tell."""
    yield from _engine(spec)
    yield from _paths(spec)
    yield from _transfer(spec)
    yield from _times(spec)
    yield from _tls(spec)
    yield from _tokens(spec)
    yield from _fabric(spec)
    yield from _traces(spec)
    yield from _stack(spec)
    yield from broken_between_legs(spec)
    yield from broken_by_owned(spec)


def _engine(spec: Spec) -> Iterator[Broken]:
    engine, kv = spec.engine, spec.kv_transfer
    for key, text in (("vllm", engine.vllm), ("nixl", engine.nixl)):
        if not version(text):
            yield Broken(
                ("engine", key), f"engine.{key}: {shown(text)} is not a version such as 0.29.0"
            )
    if () < vllm_version(spec) < OLDEST_VLLM:
        yield Broken(
            ("engine", "vllm"),
            f"engine.vllm: {engine.vllm} has no bidirectional transfer; 0.21 or later has",
        )
    if engine.venv and engine.python:
        yield Broken(
            ("engine", "python"),
            "engine.python: engine.venv is given too; give one of them",
            also=(("engine", "venv"),),
        )
    if engine.device == "cpu" and engine.cpu_kv_cache % GIB:
        yield Broken(
            ("engine", "cpu_kv_cache"),
            "engine.cpu_kv_cache: vLLM takes whole GiB; say 1GiB, 2GiB ...",
        )
    if engine.device == "cpu" and kv.buffer_device == "cuda":
        yield Broken(
            ("kv_transfer", "buffer_device"),
            "kv_transfer.buffer_device: cuda needs engine.device: cuda; leave it out or say cpu",
            also=(("engine", "device"),),
        )
    if engine.device == "cpu" and kv.cross_layer_blocks is True:
        yield Broken(
            ("kv_transfer", "cross_layer_blocks"),
            "kv_transfer.cross_layer_blocks: vLLM's CPU attention cannot read such blocks; "
            "say auto or false",
            also=(("engine", "device"),),
        )


def _traces(spec: Spec) -> Iterator[Broken]:
    seen = spec.observability
    if seen.otlp_protocol == "grpc" and (seen.otlp_endpoint or "").startswith("https:"):
        yield Broken(
            ("observability", "otlp_endpoint"),
            "observability.otlp_endpoint: vLLM speaks gRPC without TLS only; say http://, or "
            "otlp_protocol: http/protobuf",
        )


def _stack(spec: Spec) -> Iterator[Broken]:
    stack = spec.observability.stack
    where = ("observability", "stack")
    if stack.ttft_slo not in SECONDS:
        yield Broken(
            (*where, "ttft_slo"),
            f"observability.stack.ttft_slo: {format_duration(stack.ttft_slo)} is no bucket of the "
            f"router's histogram; say one of {', '.join(map(format_duration, SECONDS))}",
        )
    if stack.alert_window < 4 * stack.scrape_interval:
        yield Broken(
            (*where, "alert_window"),
            "observability.stack.alert_window: must be at least four times scrape_interval "
            f"({format_duration(stack.scrape_interval)}), or a rate has too few samples",
            also=((*where, "scrape_interval"),),
        )
    ports = (stack.prometheus_port, stack.alertmanager_port, stack.grafana_port)
    if len(set(ports)) < len(ports):
        yield Broken(
            (*where, "prometheus_port"),
            "observability.stack: prometheus_port, alertmanager_port and grafana_port must differ",
        )


def _paths(spec: Spec) -> Iterator[Broken]:
    for key, name in (("id", spec.model.id), ("served_name", spec.model.served_name)):
        if name and name.startswith("-"):
            yield Broken(
                ("model", key),
                f"model.{key}: {shown(name)} starts with '-', so vLLM would take it for an option",
            )
    paths: list[tuple[Where, str | None]] = [
        (("model", "id"), spec.model.id),
        (("engine", "venv"), spec.engine.venv),
        (("engine", "python"), spec.engine.python),
        (("router", "python"), spec.router.python),
        *(
            (("router", key), getattr(spec.router, key))
            for key in ("api_keys_file", "admin_token_file", "tls_certificate", "tls_key")
        ),
        (("kv_transfer", "secret_file"), spec.kv_transfer.secret_file),
    ]
    for where, path in paths:
        if path and re.match(r"~[^/]", path):
            yield Broken(
                where,
                f"{'.'.join(map(str, where))}: {shown(path)} is another user's home; "
                "only ~/ is known, so write the whole path",
            )
    if spec.engine.venv and ":" in spec.engine.venv:
        yield Broken(
            ("engine", "venv"), "engine.venv: a folder with ':' in its name cannot be on PATH"
        )
    if re.match(r"~(/|$)", spec.model.id) and not spec.model.served_name:
        yield Broken(
            ("model", "id"),
            "model.id: the home differs from node to node, and so would the name clients use; "
            "give model.served_name",
            also=(("model", "served_name"),),
        )


def _transfer(spec: Spec) -> Iterator[Broken]:
    kv = spec.kv_transfer
    if kv.mode == "push" and kv.bidirectional:
        yield Broken(
            ("kv_transfer", "mode"),
            "kv_transfer.mode: push has no bidirectional transfer; say pull, or "
            "bidirectional: false",
            also=(("kv_transfer", "bidirectional"),),
        )
    if kv.mode == "push" and kv.connector == "pdctl":
        yield Broken(
            ("kv_transfer", "mode"),
            "kv_transfer.mode: the pdctl connector pulls; push needs connector: stock",
            also=(("kv_transfer", "connector"),),
        )
    if kv.connector == "stock" and spec.router.reuse_proof == "connector":
        yield Broken(
            ("router", "reuse_proof"),
            "router.reuse_proof: the stock connector compares no tokens; say tokens, or "
            "kv_transfer.connector: pdctl",
            also=(("kv_transfer", "connector"),),
        )
    if kv.connector == "stock" and kv.load_failure_policy == "recompute":
        yield Broken(
            ("kv_transfer", "load_failure_policy"),
            "kv_transfer.load_failure_policy: recompute makes a stock prefill hang on a failed "
            "readback; say fail (the router repeats the prefill), or connector: pdctl",
            also=(("kv_transfer", "connector"),),
        )
    if kv.connector == "pdctl" and kv.load_failure_policy == "fail":
        yield Broken(
            ("kv_transfer", "load_failure_policy"),
            "kv_transfer.load_failure_policy: fail answers HTTP 500 where the pdctl connector can "
            "recompute; say auto",
            level="warning",
        )
    if kv.cross_layer_blocks is True and vllm_version(spec) >= CROSS_LAYER_KEY_UNTIL:
        yield Broken(
            ("kv_transfer", "cross_layer_blocks"),
            "kv_transfer.cross_layer_blocks: vLLM 0.29 and later do it by a block-major cache "
            "layout, which has not been measured; check the answers and the descriptor count",
            level="warning",
        )


def _tls(spec: Spec) -> Iterator[Broken]:
    given = {key: getattr(spec.router, key) for key in ("tls_certificate", "tls_key")}
    for key, other in (("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")):
        if given[key] and not given[other]:
            yield Broken(("router", key), f"router.{key}: needs router.{other} beside it")


def _times(spec: Spec) -> Iterator[Broken]:
    kv, router = spec.kv_transfer, spec.router
    if router.handle_ttl >= kv.decode_ttl:
        yield Broken(
            ("router", "handle_ttl"),
            f"router.handle_ttl: {format_duration(router.handle_ttl)} must stay below "
            f"kv_transfer.decode_ttl ({format_duration(kv.decode_ttl)}), or handles outlive "
            "their blocks",
            also=(("kv_transfer", "decode_ttl"),),
        )
    if router.handle_max_age is not None and router.handle_max_age <= router.handle_ttl:
        yield Broken(
            ("router", "handle_max_age"),
            f"router.handle_max_age: {format_duration(router.handle_max_age)} must be above "
            f"router.handle_ttl ({format_duration(router.handle_ttl)}); null for no renewal",
            also=(("router", "handle_ttl"),),
        )
    if router.handle_max_age is not None and kv.connector == "stock":
        yield Broken(
            ("router", "handle_max_age"),
            "router.handle_max_age: the stock connector renews nothing; say null, or "
            "kv_transfer.connector: pdctl",
            also=(("kv_transfer", "connector"),),
        )
    if kv.bidirectional and kv.decode_ttl <= READ_MARGIN_SECONDS:
        yield Broken(
            ("kv_transfer", "decode_ttl"),
            f"kv_transfer.decode_ttl: prefill declines blocks with less than "
            f"{format_duration(READ_MARGIN_SECONDS)} left, so nothing is ever read back",
            level="warning",
        )


def _tokens(spec: Spec) -> Iterator[Broken]:
    kv, longest, benchmark = spec.kv_transfer, spec.model.max_model_len, spec.benchmark
    if longest == MAX_MODEL_LEN:
        return
    about = (("model", "max_model_len"),)
    if kv.bidirectional and kv.recompute_threshold >= longest:
        yield Broken(
            ("kv_transfer", "recompute_threshold"),
            f"kv_transfer.recompute_threshold: {kv.recompute_threshold} is no less than "
            f"model.max_model_len ({longest}): no prompt would be read back",
            also=about,
        )
    if kv.block_size is not None:
        step = 32 if spec.engine.device == "cpu" else 16
        wrong = (
            f"is no multiple of {step}"
            if kv.block_size % step
            else f"is more than model.max_model_len ({longest})"
            if kv.block_size > longest
            else ""
        )
        if wrong:
            yield Broken(
                ("kv_transfer", "block_size"),
                f"kv_transfer.block_size: {kv.block_size} {wrong}",
                also=(*about, ("engine", "device")),
            )
    answers = benchmark.turns * benchmark.answer_tokens
    if answers >= longest:
        key = "answer_tokens" if "answer_tokens" in benchmark.model_fields_set else "turns"
        yield Broken(
            ("benchmark", key),
            f"benchmark.{key}: {benchmark.turns} turns of {benchmark.answer_tokens} answer tokens "
            f"do not fit into model.max_model_len ({longest})",
            also=(*about, ("benchmark", "turns"), ("benchmark", "answer_tokens")),
        )


def _fabric(spec: Spec) -> Iterator[Broken]:
    provider, backend = spec.fabric.provider, spec.kv_transfer.backend
    for key in spec.fabric.env:
        if not key.startswith(("FI_", "UCX_", "NIXL_")):
            yield Broken(
                ("fabric", "env", key),
                f"fabric.env: {key} is no FI_, UCX_ or NIXL_ variable; engine.env is for others",
                at_key=True,
            )
    if provider and backend == "UCX":
        yield Broken(
            ("fabric", "provider"),
            f"fabric.provider: {provider} is libfabric's; with backend: UCX it has no "
            "effect (leave it out, or say backend: LIBFABRIC)",
            also=(("kv_transfer", "backend"),),
        )
    if not provider and backend == "LIBFABRIC":
        yield Broken(
            ("fabric", "provider"),
            "fabric.provider is not set: where the fast fabric is missing, LIBFABRIC uses tcp "
            "without a word; say efa (or tcp, if that is meant)",
            level="warning",
            also=(("kv_transfer", "backend"),),
        )
