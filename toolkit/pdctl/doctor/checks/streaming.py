"""Whether the handle of a turn comes with its stream."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pd_connector.contract import (
    KV_TRANSFER_PARAMS,
    LOG_CONNECTOR_ACTIVE,
    LOG_STREAM_ACTIVE,
    LOG_STREAM_INACTIVE,
    PLUGIN_NAME,
)
from pdctl.doctor.checks.captures import streams
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, is_true, settings
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

PLUGIN_ACTIVE = Pattern("stream-plugin-active", (LOG_STREAM_ACTIVE,))
PLUGIN_INACTIVE = Pattern(
    "stream-plugin-inactive",
    (LOG_STREAM_INACTIVE,),
    re.escape(LOG_STREAM_INACTIVE) + r":? ?(?P<reason>.*)",
)
PLUGIN_ENGINE = Pattern("pdctl-connector-active", (LOG_CONNECTOR_ACTIVE,))

NO_PARAMS_IN_STREAM = Pattern(
    "stream-without-params",
    ("kv_transfer_params",),
    r"(?i)(?:stream|SSE|chunk).{0,400}(?:no|without|missing|lacks?)\b.{0,400}kv_transfer_params"
    r"|(?:no|without|missing)\b[\w ]*kv_transfer_params.{0,400}(?:stream|SSE|chunk)",
)
_FINISHED = re.compile(r'"finish_reason"\s*:\s*"(?:stop|length|tool_calls)"')
_SIZES = re.compile(r"(?i)\b(?:bytes|chunks?|reads?|sizes?|len(?:gth)?)\b")


def _one_way(evidence: Evidence) -> bool:
    """Whether decode is known to hand out no handles at all."""
    stated = settings(evidence, "bidirectional", "decode")
    return bool(stated) and all(is_true(each.value) is False for each in stated)


def _no_handle(evidence: Evidence) -> Iterator[Answer]:
    if _one_way(evidence):
        return
    known = settings(evidence, "bidirectional", "decode")
    told = seen(evidence, NO_PARAMS_IN_STREAM)
    if told:
        yield Finding(
            next((leg.name for leg in evidence.role("decode")), told.leg),
            "likely",
            told.excerpts,
            "Decode's streams carry no kv_transfer_params: stock vLLM puts the field into answers "
            "that are not streamed only, so with stream=true every turn is a miss.",
            "Install pdctl beside vLLM on decode (its plugin adds the field to the last chunk), or "
            "patch vLLM, or let the router ask decode without streaming.",
        )
        return
    for leg, capture in streams(evidence, "decode", DEPLOYMENT):
        done = _FINISHED.search(capture.text)
        if not done or KV_TRANSFER_PARAMS in capture.text:
            continue
        plain = [c for c in leg.http if c is not capture and KV_TRANSFER_PARAMS in c.text]
        yield Finding(
            leg.name,
            "certain" if plain else "likely" if known else "possible",
            (
                Excerpt(capture.source, capture.text.strip()[-400:]),
                *(Excerpt(c.source, c.text.strip()[:300]) for c in plain[:1]),
            ),
            "Decode's stream ends without kv_transfer_params: stock vLLM (0.29 too) puts the field "
            "into answers that are not streamed only, so with stream=true the router never gets a "
            "handle and every turn is a miss.",
            "Install pdctl beside vLLM on decode (its plugin adds the field to the last chunk; the "
            "log says 'streamed answers carry kv_transfer_params'), or patch vLLM, or let the "
            "router ask decode without streaming. Never make up block ids.",
        )
        return


def _plugin(evidence: Evidence) -> Iterator[Answer]:
    inactive = seen(evidence, PLUGIN_INACTIVE)
    for leg in evidence.role("decode"):
        told = leg.hits.get(PLUGIN_INACTIVE.name)
        allowed = leg.variable("VLLM_PLUGINS")
        filtered = allowed is not None and PLUGIN_NAME not in allowed
        silent = (
            leg.hits.get(PLUGIN_ENGINE.name) is not None
            and leg.hits.get(PLUGIN_ACTIVE.name) is None
        )
        if not told and not (filtered and not leg.hits.get(PLUGIN_ACTIVE.name)):
            continue
        reason = told.value("reason") if told else None
        why = reason or f"VLLM_PLUGINS={allowed} leaves {PLUGIN_NAME} out"
        yield Finding(
            leg.name,
            "certain" if told or silent else "likely",
            (
                *(inactive.excerpts[:2] if told else ()),
                *((Excerpt(f"{leg.name}/env.txt", f"VLLM_PLUGINS={allowed}"),) if filtered else ()),
            ),
            f"The plugin that puts the handle into streams is not at work on decode: {why}. "
            "Streamed turns yield no handle, so every turn is a miss.",
            f"Add {PLUGIN_NAME} to VLLM_PLUGINS (or unset it), and run the vLLM version that this "
            "pdctl supports; restart decode and look for 'streamed answers carry "
            "kv_transfer_params' in its log.",
        )


_BUFFERS = re.compile(
    r"(?im)^(?!\s*#).{0,200}(?:proxy_buffering\s*:?\s*[\"']?on\b"
    r"|response_body_mode\W{1,3}BUFFERED\b|proxy-buffering\W{1,4}on\b)"
)
_TIMES = re.compile(r"(?m)^\s*t=(\d+(?:\.\d+)?)")
_CURL_TIMES = re.compile(
    r"(?i)(?:time_)?starttransfer\W{1,3}(\d+\.\d+)\D{1,40}?total\W{1,3}(\d+\.\d+)"
)


def _all_at_once(leg: LegEvidence) -> Excerpt | None:
    """A stream whose first byte came with its last."""
    shown = [(each.text, each.excerpt) for each in leg.http]
    shown += [(f"{each.line}\n{each.output[:20_000]}", each.excerpt) for each in leg.commands]
    for text, excerpt in shown:
        if not re.search(r"(?i)\bstream\W{1,4}true|event-stream|data: \[DONE\]", text):
            continue
        times = [float(each) for each in _TIMES.findall(text)]
        if len(times) > 2 and times[1] - times[0] > 2 and times[-1] - times[1] < 0.1:
            return excerpt
        curl = _CURL_TIMES.search(text)
        if curl and float(curl[2]) > 2 and float(curl[1]) > 0.95 * float(curl[2]):
            return excerpt
    return None


_ZIPPED = re.compile(r"(?im)^content-encoding:\s*(?:gzip|br|deflate|zstd)\b")


def _compressed(leg: LegEvidence) -> Excerpt | None:
    """An event stream that somebody on its way has compressed; engines never do."""
    for capture in leg.http:
        zipped = _ZIPPED.search(capture.text)
        if zipped and "text/event-stream" in capture.text:
            return Excerpt(capture.source, f"text/event-stream, {zipped[0].strip()}")
    return None


def _buffered(evidence: Evidence) -> Iterator[Answer]:
    late = [(leg.name, shown) for leg in evidence.legs if (shown := _all_at_once(leg))]
    late += [(leg.name, shown) for leg in evidence.legs if (shown := _compressed(leg))]
    stated = [
        (leg.name, Excerpt(f"{leg.name}/config.txt", match[0].strip()))
        for leg in evidence.legs
        if leg.config and (match := _BUFFERS.search(leg.config.text))
    ]
    if late or stated:
        yield Finding(
            (stated or late)[0][0],
            "certain" if late and stated else "likely",
            (*(shown for _, shown in stated[:1]), *(shown for _, shown in late[:1])),
            "Something between client and engine collects the stream and passes it on at once or "
            "in lumps: the first token is as late as the last, and what takes the handle from the "
            "stream sees it late or not at all.",
            "Switch buffering off for text/event-stream: nginx proxy_buffering off or "
            "X-Accel-Buffering: no, Envoy response_body_mode STREAMED or NONE, no gzip. Check with "
            "curl -N: chunks must come one token at a time.",
            severity=None if late else "warning",
        )
        return
    for leg in evidence.legs:
        for capture in leg.http:
            if not _SIZES.search(capture.text):
                continue
            sizes = [int(each) for each in re.findall(r"\b\d{4,6}\b", capture.text)]
            lumps = [each for each in sizes if each % 4096 == 0]
            if len(lumps) < 2:
                continue
            zipped = [
                Excerpt(c.source, c.text.strip()[:300])
                for c in leg.http
                if re.search(r"(?im)^content-encoding:\s*\w|x-accel-buffering:\s*yes", c.text)
            ]
            yield Finding(
                leg.name,
                "likely",
                (capture.excerpt, *zipped[:1]),
                f"A proxy collects the stream and passes it on in pieces of {lumps[0]} bytes: its "
                "flush does not flush its own buffer"
                + (", or it compresses the stream" if zipped else "")
                + ". One that then parses the whole body as one JSON finds no handle in it either.",
                "Switch buffering off for text/event-stream: proxy_buffering off, "
                "X-Accel-Buffering: no, no gzip; in a sidecar pass events through one by one. "
                "Check with curl -N: chunks must come one token at a time.",
            )
            return


CHECKS = (
    Check(
        "PD6001",
        "Streams carry no handle",
        Category.STREAMING_METADATA,
        "error",
        "stream-without-handle",
        _no_handle,
        needs=("http|log",),
        patterns=(NO_PARAMS_IN_STREAM, *LOG_SETTINGS),
        premises=("PD6003",),
        explains=("PD4511",),
    ),
    Check(
        "PD6002",
        "A proxy buffers the stream",
        Category.STREAMING_METADATA,
        "error",
        "stream-buffered",
        _buffered,
        needs=("http|config|commands",),
        explains=("PD4511",),
    ),
    Check(
        "PD6003",
        "The streaming plugin is not at work",
        Category.STREAMING_METADATA,
        "error",
        "stream-plugin-inactive",
        _plugin,
        needs=("log|env",),
        patterns=(PLUGIN_ACTIVE, PLUGIN_INACTIVE, PLUGIN_ENGINE, *LOG_SETTINGS),
        explains=("PD5501", "PD4511"),
    ),
)
