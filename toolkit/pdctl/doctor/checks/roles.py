"""Settings that prefill and decode must have alike or each in its way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import BACKEND_CREATED, BACKEND_ERROR
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import (
    LOG_SETTINGS,
    Setting,
    backends,
    settings,
    wants_gpu,
)
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

UNKNOWN_VARIABLE = Pattern(
    "unknown-variable",
    ("Unknown vLLM environment variable",),
    r"Unknown vLLM environment variable detected: (?P<name>\w+)",
)
UNSUPPORTED = Pattern(
    "connector-unsupported",
    (
        "not supported for NIXL",
        "NixlConnector PCP",
        "NixlPushConnector does not support",
        "NixlPushConnector consumer",
        "kv_buffer is not supported",
        "DCP is not supported",
        "does not preserve CSA",
        "do not support bidirectional",
        "Connector does not support",
        "Connector doesn't support",
        "not supported with",
        "not supported by",
        "not compatible with",
        "NotImplementedError",
    ),
    r"not supported for NIXL|NixlConnector PCP|NixlPushConnector consumer|kv_buffer is not"
    r"|DCP is not supported|does not preserve CSA|do not support bidirectional"
    r"|Connector (?:does not|doesn't) support"
    r"|(?i:not (?:supported|compatible) (?:with|by) (?:the )?(?:\w*Connector\b"
    r"|disaggregated|kv[ _]transfer))"
    r"|NotImplementedError: .{0,200}(?:(?i:nixl|kv[ _]?(?:connector|transfer)|disaggregat))",
)


def _backend_variable(evidence: Evidence) -> Iterator[Answer]:
    unknown = seen(evidence, UNKNOWN_VARIABLE)
    in_log = [n for n in unknown.counts("name") if "BACKEND" in n and "NIXL" in n]
    if any("LIBFABRIC" in names for _, names in backends(evidence)):
        return
    for leg in evidence.legs:
        mine = [
            Excerpt(f"{leg.name}/env.txt", f"{name}={value}")
            for name, value in (leg.env or {}).items()
            if re.search(r"NIXL\w*BACKEND|KVCACHE_BACKEND", name)
        ]
        if leg.config:
            mine += [
                Excerpt(f"{leg.name}/config.txt", f"{path}: {value}")
                for path, value in leg.config.values
                if re.fullmatch(r"(?:.{0,400}\.)?[A-Z_]*NIXL[A-Z_]*BACKENDS?", path)
            ]
        told = bool(in_log) and leg.name in unknown.legs
        if not mine and not told:
            continue
        created = leg.hits.get(BACKEND_CREATED.name)
        opened = list(created.values.get("backend", ())) if created else []
        yield Finding(
            leg.name,
            "certain" if told or "UCX" in opened else "likely",
            (
                *mine[:2],
                *(unknown.excerpts[:1] if told else ()),
                *(created.excerpts[:1] if created else ()),
            )[:4],
            "The backend is chosen by an environment variable that nothing reads: the only place "
            "is kv_connector_extra_config.backends, and its default is [UCX].",
            'Put it there: --kv-transfer-config \'{..., "kv_connector_extra_config": {"backends": '
            '["LIBFABRIC"]}}\' (pdctl spec: kv_transfer.backend), and drop the variable. The log '
            "must then say 'Backend LIBFABRIC was instantiated'.",
        )


def _connector_kind(evidence: Evidence) -> Iterator[Answer]:
    def kind(value: object) -> str:
        text = str(value)
        return "push" if "Push" in text else "pull" if "Nixl" in text else text

    of_role: dict[str, Setting] = {}
    for each in settings(evidence, "connector"):
        of_role.setdefault(each.role, each)
    if len(of_role) < 2:
        return
    prefill, decode = of_role["prefill"], of_role["decode"]
    if kind(prefill.value) == kind(decode.value) or "Multi" in f"{prefill.value}{decode.value}":
        return
    yield Finding(
        decode.leg,
        "certain",
        (prefill.excerpt, decode.excerpt),
        f"Prefill runs {prefill.value}, decode {decode.value}: the two do not speak to each other "
        "(the compatibility hash includes push or pull).",
        "Use the same connector on both legs. Bidirectional transfer needs the pull connector.",
    )


def _roles(evidence: Evidence) -> Iterator[Answer]:
    meant = {"prefill": "kv_producer", "decode": "kv_consumer"}
    for each in settings(evidence, "role"):
        value = str(each.value)
        if value in meant.values() and value != meant[each.role]:
            yield Finding(
                each.leg,
                "certain",
                (each.excerpt,),
                f"The {each.role} leg runs as {value}: the other leg's part in transfers.",
                f"Set kv_role to {meant[each.role]} on {each.role} (pdctl render does).",
            )


def _unsupported(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, UNSUPPORTED)
    if found:
        yield Finding(
            found.leg,
            "certain",
            found.excerpts,
            "The connector refuses this combination of settings; the message says which.",
            "Change the setting that the message names on both legs. Bidirectional transfer needs "
            "the pull connector, no prefill context parallelism and no pipeline on decode.",
        )


def _expandable(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.engines:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            value = leg.variable(name) or ""
            if re.search(r"expandable_segments:\s*True", value, re.IGNORECASE) and wants_gpu(
                evidence
            ):
                failed = leg.hits.get(BACKEND_ERROR.name)
                yield Finding(
                    leg.name,
                    "likely" if failed else "possible",
                    (
                        Excerpt(f"{leg.name}/env.txt", f"{name}={value}"),
                        *(failed.excerpts[:1] if failed else ()),
                    ),
                    "PyTorch's expandable segments are on: the KV cache then lies in memory that "
                    "NIXL's backends cannot register or share with the NIC as a whole.",
                    f"Take expandable_segments:True out of {name} on every engine and restart.",
                    severity="error" if failed else "info",
                )
                return


CHECKS = (
    Check(
        "PD3001",
        "The backend is set where nobody reads it",
        Category.CONFIG_MISMATCH,
        "error",
        "backend-variable-ignored",
        _backend_variable,
        needs=("env|log|config",),
        patterns=(UNKNOWN_VARIABLE, BACKEND_CREATED, *LOG_SETTINGS),
    ),
    Check(
        "PD3010",
        "Connectors that do not fit",
        Category.CONFIG_MISMATCH,
        "error",
        "connectors-differ",
        _connector_kind,
        needs=("config|log",),
        patterns=LOG_SETTINGS,
        explains=("PD3008", "PD2009"),
    ),
    Check(
        "PD3011",
        "Roles are swapped",
        Category.CONFIG_MISMATCH,
        "error",
        "roles-swapped",
        _roles,
        needs=("config|log",),
        patterns=LOG_SETTINGS,
    ),
    Check(
        "PD3013",
        "The connector does not support this combination",
        Category.CONFIG_MISMATCH,
        "error",
        "combination-unsupported",
        _unsupported,
        needs=("log",),
        patterns=(UNSUPPORTED,),
        explains=("PD8505",),
    ),
    Check(
        "PD3014",
        "KV in expandable segments",
        Category.CONFIG_MISMATCH,
        "warning",
        "expandable-segments",
        _expandable,
        needs=("env|config",),
        patterns=(BACKEND_ERROR, *LOG_SETTINGS),
        explains=("PD1009", "PD1015", "PD2009"),
    ),
)
