"""UCX: transports, devices and variables that are not what they seem."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import BACKEND_CREATED, BACKEND_ERROR
from pdctl.doctor.checks.reading import (
    LOG_SETTINGS,
    any_seen,
    backends,
    efa_is_meant,
    seen,
    setting,
    tcp_is_meant,
    wants_gpu,
)
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

DRIVER_NOT_LOADED = Pattern(
    "verbs-driver-not-loaded",
    ("couldn't load driver", "no userspace device-specific driver"),
    r"couldn't load driver '?libefa-rdmav\d+|no userspace device-specific driver found",
)
UCX_LANES = Pattern(
    "ucx-lanes",
    ("cfg#", "ep_cfg["),
    r"(?:cfg#\d+|ep_cfg\[\d+\]:?).*?\b(?:rma|rma_am|tag|am)\((?P<lanes>[^)]*)\)",
)
NOT_AVAILABLE = Pattern(
    "ucx-not-available",
    ("not available, please use", "no usable transports", "not available"),
    r"UCX\s+(?:WARN|ERROR|DIAG)\s+(?:(?P<kind>network device|transport|device)s? "
    r"(?P<names>'[^ ]+'(?:,\s?'[^ ]+')*) (?:is|are) not available|(?P<none>no usable transports))",
)
UNUSED_VARIABLE = Pattern(
    "ucx-unused-variable",
    ("unused env",),
    r"unused env(?:ironment)?(?: variables?| vars?)?:\s*(?P<names>.*)",
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
    r"(?i)retry count(?:er)? exceeded|endpoint timeout|ibv_create_ah.*failed|"
    r"failed to modify to RTR|connect\(.*dest_addr=.*failed|UCX.*Endpoint is not connected",
)

_CONTAINER_BRIDGE = re.compile(r"tcp/(docker\d|br-|virbr|cni\d|flannel|cali|veth|podman)")
_KNOWN = (
    "UCX_TLS UCX_NET_DEVICES UCX_LOG_LEVEL UCX_LOG_FILE UCX_IB_GID_INDEX UCX_IB_TRAFFIC_CLASS "
    "UCX_IB_SL UCX_IB_NUM_PATHS UCX_IB_ROCE_REACHABILITY_MODE UCX_RNDV_SCHEME UCX_RNDV_THRESH "
    "UCX_MAX_RNDV_RAILS UCX_MAX_RMA_RAILS UCX_MAX_EAGER_RAILS UCX_CUDA_COPY_DMABUF "
    "UCX_CUDA_IPC_CACHE UCX_CUDA_IPC_ENABLE_MNNVL UCX_MEM_MMAP_HOOK_MODE UCX_MEMTYPE_CACHE "
    "UCX_RCACHE_MAX_UNRELEASED UCX_RCACHE_ENABLE UCX_RCACHE_MAX_SIZE UCX_TCP_MAX_CONN_RETRIES "
    "UCX_TCP_CM_REUSEADDR UCX_KEEPALIVE_INTERVAL UCX_KEEPALIVE_NUM_EPS UCX_RC_TIMEOUT "
    "UCX_RC_RETRY_COUNT UCX_RC_MLX5_TIMEOUT UCX_UD_TIMEOUT UCX_WARN_UNUSED_ENV_VARS "
    "UCX_PROTO_ENABLE UCX_PROTO_INFO UCX_ERROR_SIGNALS UCX_HANDLE_ERRORS UCX_SOCKADDR_TLS_PRIORITY "
    "UCX_MODULE_DIR UCX_ADDRESS_VERSION UCX_IB_PCI_RELAXED_ORDERING UCX_IB_ADDR_TYPE "
    "UCX_SRD_MAX_NUM_QPS UCX_IB_REG_METHODS UCX_CLOSE_TIMEOUT UCX_USE_MT_MUTEX UCX_VFS_ENABLE"
).split()
_NOT_UCX_OWN = re.compile(
    r"UCX_(?:HOME|ROOT|DIR|PATH|VERSION|COMMIT|BRANCH|REF|REPO|LIB\w*|INCLUDE\w*|PREFIX|BIN)$"
)


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


def _not_available(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, NOT_AVAILABLE)
    names = [n for text in found.counts("names") for n in re.findall(r"'([^']+)'", text)]
    missing = [name for name in dict.fromkeys(names) if "cuda" not in name and "rocm" not in name]
    if not found or (names and not missing) or (not names and "none" not in found.values):
        return
    stopped = "none" in found.values
    asked = evidence.text(r"^UCX_(?:TLS|NET_DEVICES)\b", "env")
    yield Finding(
        found.leg,
        "certain",
        (*found.excerpts, *(each.excerpt for each in asked[:2])),
        f"UCX is told to use {', '.join(missing) or 'devices or transports'}, which this host "
        "does not have: the name in UCX_NET_DEVICES or UCX_TLS is wrong here. "
        + (
            "Nothing usable was left, so NIXL cannot create its UCX backend."
            if stopped
            else "Only a warning appears; UCX goes on with what is left of the list, tcp for "
            "instance."
        ),
        "Compare UCX_NET_DEVICES with ls /sys/class/infiniband and UCX_TLS with ucx_info -d on "
        "this node; use UCX_NET_DEVICES=all unless a rail must be pinned.",
        severity="error" if stopped else None,
    )


def near_misses(names: Iterator[str] | list[str]) -> dict[str, str]:
    """Names of UCX variables that are no variable of UCX but nearly one: name -> what is meant."""
    found = {}
    for name in names:
        if not name.startswith("UCX_") or name in _KNOWN or _NOT_UCX_OWN.match(name):
            continue
        close = difflib.get_close_matches(name, _KNOWN, 1, 0.86)
        letters = [known for known in _KNOWN if sorted(known) == sorted(name)]
        if close or letters:
            found[name] = (letters or close)[0]
    return found


def _misspelt(evidence: Evidence) -> Iterator[Answer]:
    unused = seen(evidence, UNUSED_VARIABLE)
    told: dict[str, str] = {}
    for text in unused.counts("names"):
        told.update(re.findall(r"(UCX_\w+) ?\(maybe: (UCX_\w+)\??\)", text))
        told.update(near_misses(re.findall(r"\bUCX_\w+", text)))
    for leg in evidence.legs:
        wrong = {**(told if leg.name in unused.legs else {}), **near_misses(list(leg.env or {}))}
        if leg.config:
            keys = [path.rpartition(".")[2] for path, _ in leg.config.values]
            wrong.update(near_misses(keys))
        if not wrong:
            continue
        in_env = tuple(
            Excerpt(f"{leg.name}/env.txt", f"{name}={leg.env[name]}")
            for name in wrong
            if leg.env and name in leg.env
        )
        yield Finding(
            leg.name,
            "certain" if leg.name in unused.legs else "likely",
            ((unused.excerpts[:1] if leg.name in unused.legs else ()) + in_env)[:4],
            "UCX variables are misspelt and have no effect: "
            + ", ".join(f"{name} ({meant}?)" for name, meant in wrong.items())
            + ". UCX warns once at most, and not at all with UCX_WARN_UNUSED_ENV_VARS=n.",
            "Correct the names: ucx_info -c lists those that exist.",
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
    if not bad:
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
        bad.leg,
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
        "PD1010",
        "UCX is told to use what is not there",
        Category.EFA_FABRIC,
        "error",
        "ucx-device-missing",
        _not_available,
        needs=("log|commands",),
        patterns=(NOT_AVAILABLE,),
        explains=("PD1015", "PD1016", "PD2009", "PD6502", "PD6504"),
    ),
    Check(
        "PD1011",
        "Misspelt UCX variables",
        Category.EFA_FABRIC,
        "warning",
        "ucx-variable-misspelt",
        _misspelt,
        needs=("log|env|config",),
        patterns=(UNUSED_VARIABLE,),
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
