"""Parsers of what fabric and GPU commands print."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pdctl.doctor.evidence.facts import Command, LegEvidence

_NOT_INSTALLED = re.compile(r"not found|No such file|# exit 127|cannot be run")
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


@dataclass(frozen=True)
class FiInfo:
    """What a query of ``fi_info`` found: ``(provider, domain)`` of every entry. ``installed`` is
    False when there is no such program; ``empty`` is what it says when nothing matches."""

    command: Command
    installed: bool
    entries: tuple[tuple[str, str], ...]
    failed: bool

    @property
    def empty(self) -> bool:
        return self.installed and not self.entries

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(domain for _, domain in self.entries))


def parse_fi_info(command: Command) -> FiInfo:
    """Of ``fi_info [-p PROVIDER] ...`` in its long form (``provider:`` and ``domain:`` lines)."""
    providers = re.findall(r"^\s*provider:\s*(\S+)", command.output, re.MULTILINE)
    domains = re.findall(r"^\s*domain:\s*(\S+)", command.output, re.MULTILINE)
    failed = bool(re.search(r"fi_getinfo: -\d+|# exit [1-9]", command.output))
    installed = bool(providers) or not re.search(
        r"fi_info: (?:command )?not found|# exit 127|# cannot be run|No such file", command.output
    )
    entries = tuple(zip(providers, domains, strict=False)) if len(domains) else ()
    return FiInfo(command, installed, entries, failed)


def efa_query(leg: LegEvidence) -> FiInfo | None:
    """What ``fi_info -p efa`` found on the leg's node; None when it was not asked."""
    for command in leg.commands:
        words = command.line.split()
        if words[:1] == ["fi_info"] and "efa" in words and "FI_HMEM" not in words:
            return parse_fi_info(command)
    return None


def libfabric_version(leg: LegEvidence) -> tuple[str, Command] | None:
    """As ``fi_info --version`` says it."""
    command = leg.command(r"^fi_info --version")
    match = re.search(r"^libfabric:\s*(\S+)", command.output, re.MULTILINE) if command else None
    return (match[1], command) if command and match else None


def first_match(command: Command | None, regex: str) -> tuple[str, Command] | None:
    """The first group of the first match in a command's output."""
    match = re.search(regex, command.output, re.MULTILINE) if command else None
    return (match[1], command) if command and match else None


def installer_version(leg: LegEvidence) -> tuple[str, Command] | None:
    return first_match(leg.command("efa_installed_packages"), r"EFA installer version:\s*(\S+)")


def module_version(leg: LegEvidence) -> tuple[str, Command] | None:
    return first_match(leg.command("module/efa/version"), r"^(\d\S*)$") or first_match(
        leg.command("^modinfo.* efa"), r"^version:\s*(\S+)"
    )


def driver_version(leg: LegEvidence) -> tuple[str, Command] | None:
    return first_match(
        leg.command("^nvidia-smi --version"), r"(?i)driver version\s*:\s*(\S+)"
    ) or first_match(leg.command("^nvidia-smi --query-gpu"), r"^\d+, [^,]+, ([\d.]+),")


def cuda_version(leg: LegEvidence) -> tuple[str, Command] | None:
    return first_match(leg.command("^nvidia-smi( --version)?$"), r"(?i)cuda version\s*:\s*([\d.]+)")


def gpus(leg: LegEvidence) -> list[str]:
    """PCI addresses of the GPUs, in lower case."""
    command = leg.command("^nvidia-smi --query-gpu")
    found = (
        re.findall(r"[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d", command.output)
        if (command)
        else []
    )
    return [address.lower()[4:] for address in found]


def devices(leg: LegEvidence) -> tuple[dict[str, list[str]], Command] | None:
    """RDMA devices and the PCI addresses on the way to each, from the root; None when it was not
    looked at."""
    command = leg.command("^ls -l /sys/class/infiniband")
    return (_paths(command), command) if command else None


def gpu_paths(leg: LegEvidence) -> dict[str, list[str]]:
    """GPUs, by PCI address, and the PCI addresses on the way to each."""
    command = leg.command("^ls -l /sys/bus/pci/drivers/nvidia")
    paths = _paths(command) if command else {}
    return {name: path for name, path in paths.items() if _ADDRESS.fullmatch(name)}


def _paths(command: Command) -> dict[str, list[str]]:
    links = re.findall(r"(\S{1,300}) -> (\S+)", command.output)
    return {name: _ADDRESS.findall(target) for name, target in links}


def rails_of(gpu: list[str], rails: dict[str, list[str]]) -> list[str]:
    """Devices on the same PCIe switch as a GPU: both are below one bridge that is not the root's
    port alone. Two levels up from a device is the upstream port of its switch."""
    above = gpu[:-2]
    if not above:
        return []
    return [name for name, path in rails.items() if path[: len(above)] == above]


def missing_libraries(commands: Iterable[Command]) -> list[tuple[str, str, Command]]:
    """(plugin, what is missing or too old, command) of ``ldd`` of NIXL's plugins."""
    found = []
    for command in commands:
        plugin = re.search(r"^ldd .*libplugin_(\w+)\.so", command.line)
        if not plugin:
            continue
        for line in command.output.splitlines():
            absent = re.search(r"^\s*(\S+) => not found", line)
            old = re.search(r"(\S{1,300}): version [`'](\S+)' not found", line)
            if absent:
                found.append((plugin[1], absent[1], command))
            elif old:
                found.append((plugin[1], f"{old[1].rpartition('/')[2]}: {old[2]}", command))
    return found
