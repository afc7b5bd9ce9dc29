"""UCX: transports that are missing, slow or do not reach the peer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import BACKEND_CREATED, BACKEND_ERROR
from pdctl.doctor.checks.reading import any_seen, seen
from pdctl.doctor.checks.settings import (
    LOG_SETTINGS,
    backends,
    efa_is_meant,
    setting,
    tcp_is_meant,
    wants_gpu,
)
from pdctl.doctor.checks.ucx_devices import NOT_AVAILABLE
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

DRIVER_NOT_LOADED = Pattern(
    "verbs-driver-not-loaded",
    (
        "couldn't load driver",
        "no userspace device-specific driver",
        "version `EFA_",
        "version `IBVERBS_",
        "version 'EFA_",
        "version 'IBVERBS_",
    ),
    r"couldn't load driver '?libefa-rdmav\d+|no userspace device-specific driver found"
    r"|version [`'](?:EFA|IBVERBS)_[\w.]+' not found",
)
UCX_LANES = Pattern(
    "ucx-lanes",
    ("cfg#", "ep_cfg["),
    r"(?:cfg#\d+|ep_cfg\[\d+\]:?).{0,400}?\b(?:rma|rma_am|tag|am)\((?P<lanes>[^)]*)\)",
)
NO_CUDA = Pattern(
    "ucx-no-cuda",
    (
        "memory is detected as host by UCX",
        "UCX CUDA support was not found",
        "UCX ROCm support was not",
    ),
)
BAD_PATH = Pattern(
    "ucx-bad-path",
    (
        "retry count exceeded",
        "retry counter exceeded",
        "ndpoint timeout",
        "ibv_create_ah",
        "failed to modify to RTR",
        "dest_addr=",
        "Endpoint is not connected",
    ),
    r"(?i)retry count(?:er)? exceeded|endpoint timeout|ibv_create_ah.{0,400}failed|"
    r"failed to modify to RTR|connect\(.{0,400}dest_addr=.{0,400}"
    r"failed|UCX.{0,400}Endpoint is not connected",
)

_CONTAINER_BRIDGE = re.compile(r"tcp/(docker\d|br-|virbr|cni\d|flannel|cali|veth|podman)")


def _driver_abi(evidence: Evidence) -> Iterator[Answer]:
    told = seen(evidence, DRIVER_NOT_LOADED)
    lanes = seen(evidence, UCX_LANES)
    for leg in evidence.legs:
        texts = [(c, f"{c.line}\n{c.output}") for c in leg.commands]
        have = {n: c for c, text in texts for n in re.findall(r"libefa-rdmav(\d+)", text)}
        want = {
            n: c
            for c, text in texts
            if "libefa-rdmav" not in text
            for n in re.findall(r"\brdmav(\d+)\b", c.output)
        }
        mismatch = bool(have and want and not set(have) & set(want))
        if not mismatch and leg.name not in told.legs:
            continue
        shown = [
            *told.excerpts[:2],
            *(next(iter(d.values())).excerpt for d in (have, want) if mismatch),
        ]
        if any("tcp/" in each for each in lanes.counts("lanes")):
            shown += lanes.excerpts[:1]
        yield Finding(
            leg.name,
            "certain" if mismatch else "likely",
            tuple(shown[:4]),
            "rdma-core and the EFA userspace driver come from different releases: libibverbs loads "
            "only driver libraries of its own private ABI (the number in rdmavNN), so verbs sees "
            "no EFA and UCX takes tcp without a warning.",
            "Install rdma-core and EFA's driver from one EFA installer release in the image, or "
            "use backends: [LIBFABRIC]. Compare ls /opt/amazon/efa/lib*/libibverbs with strings "
            "libibverbs.so.1 | grep rdmav; UCX_LOG_LEVEL=info must show srd or rc lanes, not tcp.",
        )


def _no_cuda(evidence: Evidence) -> Iterator[Answer]:
    told, absent = seen(evidence, NO_CUDA), seen(evidence, NOT_AVAILABLE)
    cuda = any("cuda" in text or "rocm" in text for text in absent.counts("names"))
    for leg in evidence.legs:
        tls = leg.variable("UCX_TLS")
        listed = tls is not None and not re.search(r"all|cuda|rocm|\^", tls)
        failed = leg.hits.get(BACKEND_ERROR.name)
        device = (
            setting(evidence, "buffer_device", leg.role)
            if leg.role in ("prefill", "decode")
            else None
        )
        on_gpu = device is not None and str(device.value) in ("cuda", "gpu")
        by_log = leg.name in told.legs or (cuda and leg.name in absent.legs)
        if not by_log and not (listed and wants_gpu(evidence) and on_gpu and failed):
            continue
        excerpts = any_seen(evidence, (NO_CUDA, NOT_AVAILABLE)).excerpts if by_log else ()
        env = (Excerpt(f"{leg.name}/env.txt", f"UCX_TLS={tls}"),) if listed else ()
        yield Finding(
            leg.name,
            "certain" if by_log else "likely",
            (*excerpts[:3], *env, *(failed.excerpts[:1] if failed and not by_log else ())),
            "UCX has no CUDA transports: "
            + (
                f"the list UCX_TLS={tls} leaves cuda_copy and cuda_ipc out"
                if listed
                else "the UCX that was loaded is built without CUDA, or UCX_TLS leaves cuda_copy "
                "and cuda_ipc out"
            )
            + ", so GPU memory looks like host memory and cannot be registered.",
            "Use UCX_TLS=all, a list with ^ of what to leave out, or add cuda_copy,cuda_ipc. Make "
            "sure the UCX of the NIXL wheel is the one in use: NIXL_LOG_LEVEL=INFO shows 'NIXL "
            "UCX backend bound to UCX ... at PATH'.",
        )


def _wrong_path(evidence: Evidence) -> Iterator[Answer]:
    bad, lanes = seen(evidence, BAD_PATH), seen(evidence, UCX_LANES)
    bridge = next((m for t in lanes.counts("lanes") if (m := _CONTAINER_BRIDGE.search(t))), None)
    if not bad and not bridge:
        return
    if bridge:
        cause = (
            f"UCX sends over {bridge[1]}, an interface of this host's containers that the peer "
            "cannot be reached through."
        )
    else:
        cause = (
            "The RDMA path between the legs does not work: packets are not acknowledged. On RoCE "
            "that is mostly the wrong GID index or interface, or a network that is not lossless."
        )
    yield Finding(
        bad.leg if bad else lanes.leg,
        "likely",
        (*bad.excerpts[:2], *(lanes.excerpts[:1] if bridge else ())),
        cause,
        "Name the interface that reaches the peer: UCX_NET_DEVICES=eth0 or mlx5_0:1, on both "
        "legs; on RoCE choose the RoCE v2 GID with UCX_IB_GID_INDEX (show_gids). Test with "
        "ucx_perftest between the two nodes.",
    )


def _on_tcp(evidence: Evidence) -> Iterator[Answer]:
    """UCX on tcp where RDMA was asked for by name, or on EFA's nodes at all."""
    yield from _on_efa(evidence)
    lanes = seen(evidence, UCX_LANES)
    texts = list(lanes.counts("lanes"))
    if not texts or tcp_is_meant(evidence) or not all("tcp/" in each for each in texts):
        return
    wanted = [
        each
        for each in evidence.text(r"^UCX_(?:TLS|NET_DEVICES)=(.*)$", "env")
        if re.search(r"\b(?:srd|rc|dc|ud|ib|mlx5|rdmap)", each.match[1])
    ]
    devices = evidence.text(r"\b(?:rdmap\d+s\d+|mlx5_\d+)\b", "commands")
    if wanted or devices:
        yield Finding(
            lanes.leg,
            "likely",
            (*lanes.excerpts[:2], *(each.excerpt for each in (wanted or devices)[:1])),
            "UCX moves KV over tcp although RDMA devices are there or asked for.",
            "Run ucx_info -d on the node: the RDMA transports must be listed. UCX_LOG_LEVEL=info "
            "shows the lanes in use. On EFA use backends: [LIBFABRIC].",
        )


def _on_efa(evidence: Evidence) -> Iterator[Answer]:
    if tcp_is_meant(evidence) or any("LIBFABRIC" in names for _, names in backends(evidence)):
        return
    if seen(evidence, UCX_LANES):
        return
    for leg in evidence.engines:
        created = leg.hits.get(BACKEND_CREATED.name)
        names = set(created.values.get("backend", {})) if created else set()
        present = [
            c
            for c in leg.commands
            if "fi_info" in c.line and re.search(r"provider: efa|^efa", c.output)
        ]
        if created and names == {"UCX"} and (present or efa_is_meant(evidence)):
            yield Finding(
                leg.name,
                "likely",
                (*created.excerpts[:1], *(each.excerpt for each in present[:1])),
                "The node has EFA, and KV moves through UCX, NIXL's default. It reaches EFA "
                "through srd at best and through tcp mostly, at a fraction of the fabric's rate.",
                'Set kv_connector_extra_config {"backends": ["LIBFABRIC"]} (pdctl spec: '
                "kv_transfer.backend: LIBFABRIC) and FI_PROVIDER=efa on both legs.",
            )
            return


CHECKS = (
    Check(
        "PD1006",
        "The EFA driver library does not fit rdma-core",
        Category.EFA_FABRIC,
        "error",
        "rdma-core-abi",
        _driver_abi,
        needs=("log|commands",),
        patterns=(DRIVER_NOT_LOADED, UCX_LANES),
        explains=("PD1001", "PD1005", "PD1010", "PD1016", "PD4507"),
    ),
    Check(
        "PD1012",
        "UCX without CUDA",
        Category.EFA_FABRIC,
        "error",
        "ucx-without-cuda",
        _no_cuda,
        needs=("log|commands|env",),
        patterns=(NO_CUDA, NOT_AVAILABLE, BACKEND_ERROR, *LOG_SETTINGS),
        explains=("PD1010", "PD1015", "PD2009", "PD6504"),
    ),
    Check(
        "PD1013",
        "The path that UCX chose does not work",
        Category.EFA_FABRIC,
        "error",
        "ucx-wrong-path",
        _wrong_path,
        needs=("log|commands",),
        patterns=(BAD_PATH, UCX_LANES),
        explains=("PD1015", "PD1016", "PD2006", "PD2009"),
    ),
    Check(
        "PD1016",
        "UCX runs on tcp",
        Category.EFA_FABRIC,
        "warning",
        "ucx-on-tcp",
        _on_tcp,
        needs=("log|commands",),
        patterns=(UCX_LANES, BACKEND_CREATED, *LOG_SETTINGS),
        premises=("PD3001",),
        explains=("PD4507",),
    ),
)
