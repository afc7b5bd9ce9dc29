"""UCX: devices and variables named in the environment that are not what they seem."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from pdctl.doctor.checks.reading import seen
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

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


def _named_but_absent(evidence: Evidence) -> Iterator[Answer]:
    """UCX_NET_DEVICES against what the node lists."""
    for leg in evidence.legs:
        named = re.findall(r"[\w.-]{1,100}(?=:\d)", leg.variable("UCX_NET_DEVICES") or "")
        listed = next(
            (
                command
                for command in leg.commands
                if re.search(r"/sys/class/infiniband|ibv_devices|rdma link", command.line)
                and re.search(r"\b(?:mlx\d|rdmap|efa_|ibp|roce)\w*", command.output)
            ),
            None,
        )
        absent = [name for name in named if listed and not re.search(rf"\b{name}\b", listed.output)]
        if absent and listed:
            yield Finding(
                leg.name,
                "likely",
                (
                    Excerpt(f"{leg.name}/env.txt", f"UCX_NET_DEVICES={','.join(named)}"),
                    listed.excerpt,
                ),
                f"UCX_NET_DEVICES names {', '.join(absent)}, which this host does not have: with "
                "nothing left UCX does not start, with something left it goes on with that.",
                "Compare UCX_NET_DEVICES with ls /sys/class/infiniband on this node, or use "
                "UCX_NET_DEVICES=all.",
            )


def _not_available(evidence: Evidence) -> Iterator[Answer]:
    if not seen(evidence, NOT_AVAILABLE):
        yield from _named_but_absent(evidence)
        return
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


CHECKS = (
    Check(
        "PD1010",
        "UCX is told to use what is not there",
        Category.EFA_FABRIC,
        "error",
        "ucx-device-missing",
        _not_available,
        needs=("log|commands|env",),
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
)
