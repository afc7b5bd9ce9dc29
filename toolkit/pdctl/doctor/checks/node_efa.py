"""EFA on the nodes: provider, interfaces, rails, GPUDirect, limits.

The expected numbers are those of AWS's instance types (documented EFA counts) and of the
environment that bidirectional transfer was measured in (two p5en.48xlarge nodes).
"""

from collections.abc import Iterator

from pdctl.doctor.evidence import fabric
from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.legs import expects_efa, on_libfabric, provider
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, More, Unknown

INTERFACES = {
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
}
"""EFA interfaces of an instance type."""

UNLIMITED = "unlimited"
_MEMLOCK_BYTES = 16 << 30
"""With less, registering KV caches of usual sizes fails."""


def on_efa(evidence: Evidence) -> list[LegEvidence]:
    """Legs that are meant to move KV over EFA."""
    return [leg for leg in evidence.engines if expects_efa(leg, evidence)]


def without(legs: list[LegEvidence], command: str) -> Iterator[Unknown]:
    """The answer about legs on whose node a command (a regex) was not run."""
    lacking = [leg.name for leg in legs if leg.command(command) is None]
    if lacking:
        shown = command.lstrip("^").replace("\\", "")
        yield Unknown(
            f"{', '.join(lacking)}: no output of `{shown}`", "run `pdctl collect` on the node"
        )


def _no_provider(evidence: Evidence) -> Iterator[Answer]:
    yield from without(on_efa(evidence), "^fi_info .*efa")
    for leg in on_efa(evidence):
        query = fabric.efa_query(leg)
        if query is None:
            continue
        found = fabric.devices(leg)
        if not query.installed and found is not None and not found[0]:
            yield Finding(
                leg.name,
                "certain",
                (found[1].excerpt, query.command.excerpt),
                "The node shows no RDMA device, and the EFA software (fi_info) is not installed.",
                "Attach EFA interfaces to the instance and install aws-efa-installer; in a "
                "container, pass /dev/infiniband/uverbs*. If tcp is meant, say so: "
                "fabric.provider: tcp.",
            )
        elif not query.installed:
            yield Unknown(
                f"{leg.name}: there is no fi_info on its node",
                "install the EFA software (it brings /opt/amazon/efa/bin/fi_info), then repeat",
            )
        elif query.empty:
            forced = provider(leg, evidence)
            then = (
                f"FI_PROVIDER={forced} makes NIXL fail to start its LIBFABRIC backend."
                if forced
                else "FI_PROVIDER is not set: NIXL falls back to tcp without a word."
            )
            yield Finding(
                leg.name,
                "certain",
                (query.command.excerpt,),
                f"libfabric finds no EFA device on this node. {then}",
                "Attach EFA interfaces to the instance, pass /dev/infiniband/uverbs* to the "
                "container, install aws-efa-installer; then `fi_info -p efa -t FI_EP_RDM` lists "
                "them. If tcp is meant, say so: fabric.provider: tcp.",
            )


def _few_interfaces(evidence: Evidence) -> Iterator[Answer]:
    yield from without(on_efa(evidence), "^ls -l /sys/class/infiniband")
    for leg in on_efa(evidence):
        found = fabric.devices(leg)
        if found is None:
            continue
        devices, command = found
        kind = fabric.first_match(leg.command("product_name"), r"^(\S+)$")
        spec = evidence.spec.fabric.interfaces if evidence.spec else None
        wanted = spec or (INTERFACES.get(kind[0]) if kind else None)
        if wanted and devices and len(devices) < wanted:
            says = "the spec says" if spec else f"a {kind[0] if kind else 'node'} has"
            yield Finding(
                leg.name,
                "certain",
                (command.excerpt,),
                f"The node shows {len(devices)} RDMA devices, {says} {wanted}: transfers have "
                f"{len(devices)} of {wanted} rails.",
                "Launch the instance with all its network cards as EFA interfaces (NIC 0-"
                f"{wanted - 1}, InterfaceType efa), and pass every /dev/infiniband/uverbs* to the "
                "container.",
            )


def _rails(evidence: Evidence) -> Iterator[Answer]:
    yield from without(on_efa(evidence), "^ls -l /sys/bus/pci/drivers/nvidia")
    for leg in on_efa(evidence):
        found, gpus = fabric.devices(leg), fabric.gpu_paths(leg)
        if found is None or not found[0] or not gpus:
            continue
        rails, command = found
        known = {gpu: path for gpu, path in gpus.items() if len(path) > 2}
        if not known:
            yield Unknown(
                f"{leg.name}: the node does not show its PCIe switches",
                "run the legs with NIXL_LOG_LEVEL=DEBUG and look for 'mapped to rail'",
            )
            continue
        wanted = max(1, len(rails) // len(gpus))
        few = {
            gpu: count
            for gpu, path in known.items()
            if (count := len(fabric.rails_of(path, rails))) < wanted
        }
        if few:
            listed = ", ".join(f"{gpu} has {count}" for gpu, count in sorted(few.items()))
            yield Finding(
                leg.name,
                "likely",
                (command.excerpt,),
                f"A GPU of this node should have {wanted} rails on its PCIe switch; {listed}. Its "
                "KV crosses the CPU or another GPU's rails.",
                "Check that all EFA interfaces are attached (NIC 0-15 on p5en) and visible in the "
                "container; compare `ls -l /sys/class/infiniband` with a healthy node.",
            )


def _no_gpudirect(evidence: Evidence) -> Iterator[Answer]:
    yield from without(on_efa(evidence), "^fi_info .*FI_HMEM")
    for leg in on_efa(evidence):
        if (leg.config.get("kv_buffer_device") if leg.config else None) == "cpu":
            continue
        modules = leg.command(r"/proc/modules")
        with_memory = next((c for c in leg.commands if "FI_HMEM" in c.line), None)
        query = fabric.efa_query(leg)
        if with_memory is None or query is None or not query.entries:
            continue
        if fabric.parse_fi_info(with_memory).empty:
            evidence_of = (with_memory.excerpt, *((modules.excerpt,) if modules else ()))
            yield Finding(
                leg.name,
                "certain",
                evidence_of,
                "EFA is there but cannot reach GPU memory (no FI_HMEM): neither dmabuf nor a "
                "peer-memory module works with this driver.",
                "Load efa_nv_peermem or nvidia_peermem, or install an EFA kernel module and "
                "driver with dmabuf; `fi_info -p efa -c FI_HMEM` must list entries.",
            )


def _memlock(evidence: Evidence) -> Iterator[Answer]:
    yield from without(on_efa(evidence), "/limits$")
    for leg in evidence.engines:
        if not (on_libfabric(leg, evidence) and expects_efa(leg, evidence)):
            continue
        found = fabric.first_match(leg.command(r"/limits$"), r"^Max locked memory\s+(\S+)")
        if found and found[0] != UNLIMITED and int(found[0]) < _MEMLOCK_BYTES:
            yield Finding(
                leg.name,
                # Nothing has failed of it yet.
                "likely",
                (Excerpt(found[1].source, f"Max locked memory {found[0]}"),),
                f"The process may lock {int(found[0]) >> 10} KiB of memory; registering KV "
                "buffers for EFA needs all of them locked.",
                "Raise the limit: `ulimit -l unlimited`, docker `--ulimit memlock=-1:-1`, systemd "
                "`LimitMEMLOCK=infinity`; then restart the leg.",
            )


CHECKS = (
    Check(
        code="PD1061",
        title="The node has fewer EFA interfaces than it should",
        category=Category.EFA_FABRIC,
        severity="warning",
        playbook="too-few-efa-interfaces",
        needs=("commands",),
        premises=("PD1001",),
        run=_few_interfaces,
        explains=("PD1062",),
        cheap=True,
    ),
    Check(
        code="PD1062",
        title="GPUs without rails on their PCIe switch",
        category=Category.EFA_FABRIC,
        severity="warning",
        playbook="rails-not-on-gpu-switch",
        needs=("commands",),
        premises=("PD1001",),
        run=_rails,
    ),
)

MORE = (
    More("PD1001", _no_provider, ("commands",), explains=("PD1061", "PD6562"), cheap=True),
    More("PD1009", _no_gpudirect, ("commands",), cheap=True),
    More("PD1008", _memlock, ("commands",)),
)
