"""Libraries and wheels that do not fit NIXL or this host."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.lines import BACKEND_ERROR, BACKEND_UNSUPPORTED
from pdctl.doctor.checks.reading import seen
from pdctl.doctor.checks.settings import LOG_SETTINGS, settings
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import Answer, Category, Check, Excerpt, Finding, Pattern

LIBNUMA = Pattern("libnuma-abort", ("request to allocate mask for invalid number",))
MISSING_LIBRARY = Pattern(
    "plugin-library-missing",
    ("Failed to load plugin", "cannot open shared object file"),
    r"Failed to load plugin from (?P<plugin>\S+): (?P<library>\S+): cannot open shared object",
)
OLD_SYMBOLS = Pattern(
    "libfabric-symbols",
    ("FABRIC_1.", "FABRIC_2.", "version `", "version 'FABRIC"),
    r"version [`'](?P<symbol>FABRIC_[\d.]+)'? not found",
)
BOUND_UCX = Pattern(
    "bound-ucx",
    ("backend bound to UCX",),
    r"bound to UCX (?P<version>\S+) at (?P<path>\S+)",
)
NIXL_MISSING = Pattern(
    "nixl-missing",
    (
        "NIXL is not available",
        "No module named 'nixl",
        "libcudart.so",
        "nixl_ep",
        "undefined symbol",
    ),
    r"NIXL is not available|No module named 'nixl\w*'|(?P<library>libcudart\.so\.\d+): cannot open"
    r"|(?:nixl\S*).{0,400}undefined symbol",
)
UNKNOWN_BACKEND = Pattern(
    "backend-name-unknown",
    ("due to the missing plugin", "Skipping backend registration"),
    r"Skipping backend registration (?P<backend>\w+)",
)


def _libnuma(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, LIBNUMA)
    if found:
        told = [
            Excerpt(f"{leg.name}/versions.txt", f"{name} {text}")
            for leg in evidence.legs
            for name, text in (leg.versions or {}).items()
            if name.startswith(("nixl", "libfabric"))
        ]
        yield Finding(
            found.leg,
            "likely",
            (*found.excerpts[:1], *told[:3]),
            "libnuma ends the process while a NIXL plugin starts: NIXL 1.0 loads every plugin it "
            "discovers, the LIBFABRIC one too when only UCX is wanted, and that brings libnuma and "
            "this host's libfabric in. vLLM is not at fault, and there is no traceback.",
            "Use a NIXL that loads plugins only when asked (1.4.1 does), or move the plugin that "
            "you do not use away (libplugin_LIBFABRIC.so). With LIBFABRIC wanted, use the EFA "
            "installer's libfabric instead of the distribution's.",
        )


def _plugin(evidence: Evidence) -> Iterator[Answer]:
    missing, refused = seen(evidence, MISSING_LIBRARY), seen(evidence, BACKEND_UNSUPPORTED)
    not_found = [
        each
        for each in evidence.text(r"^\s*(\S+) => not found", "commands")
        if re.search(r"\.so", each.match[1])
    ]
    if not missing and not refused:
        return
    libraries = dict.fromkeys([*missing.counts("library"), *(each.match[1] for each in not_found)])
    backend = refused.value("backend") or (
        "LIBFABRIC" if "LIBFABRIC" in str(missing.values.get("plugin", "")) else "UCX"
    )
    if not refused and not settings(evidence, "backends"):
        return
    yield Finding(
        refused.leg if refused else missing.leg,
        "certain" if libraries else "likely",
        (*missing.excerpts[:1], *refused.excerpts[:1], *(each.excerpt for each in not_found[:2])),
        f"NIXL's {backend} plugin is on disk and cannot be loaded"
        + (f": {', '.join(libraries)} is missing on this host" if libraries else "")
        + ". The wheel brings UCX but neither libfabric.so.1 nor libhwloc.so.15 nor libcuda.so.1, "
        "and NIXL tells the reason at log level INFO only.",
        "Install what is missing: libfabric from the EFA installer with /opt/amazon/efa/lib on the "
        "loader path (ldconfig or LD_LIBRARY_PATH), apt-get install libhwloc15, and the GPU "
        "driver's libcuda mounted. ldd libplugin_LIBFABRIC.so | grep 'not found' must be empty; "
        "NIXL_LOG_LEVEL=INFO shows the reason.",
    )


def _old_libfabric(evidence: Evidence) -> Iterator[Answer]:
    found, refused = seen(evidence, OLD_SYMBOLS), seen(evidence, BACKEND_UNSUPPORTED)
    if found:
        yield Finding(
            found.leg,
            "certain",
            (*found.excerpts[:2], *refused.excerpts[:1]),
            f"The libfabric that is loaded is older than NIXL's LIBFABRIC plugin needs "
            f"({found.value('symbol')} is not in it): mostly the distribution's instead of the "
            "EFA installer's.",
            "Install libfabric 2.x with the EFA installer and put its folder first on the loader "
            "path: LD_LIBRARY_PATH=/opt/amazon/efa/lib. fi_info --version shows which one is used.",
        )


_UCP = re.compile(r"/\S{0,300}libucp\S*")


def _two_ucx(evidence: Evidence) -> Iterator[Answer]:
    bound, failed = seen(evidence, BOUND_UCX), seen(evidence, BACKEND_ERROR)
    for leg in evidence.legs:
        copies = [
            (set(_UCP.findall(c.output.replace("'", " ").replace(",", " "))), c)
            for c in leg.commands
        ]
        two = next(
            (c for paths, c in copies if len({p.rpartition("/")[0] for p in paths}) > 1), None
        )
        hits = leg.hits.get(BOUND_UCX.name)
        foreign = [
            path
            for path in (list(hits.values.get("path", ())) if hits else [])
            if not re.search(r"nixl", path)
        ]
        if not two and not (foreign and failed):
            continue
        yield Finding(
            leg.name,
            "certain" if two else "likely",
            (
                *((two.excerpt,) if two else ()),
                *(bound.excerpts[:1] if foreign else ()),
                *failed.excerpts[:1],
            ),
            "Two copies of UCX meet in one process: the one in the NIXL wheel and the system's, "
            "which MPI, HPC-X or LD_LIBRARY_PATH brings in. Registration or the first transfer "
            "then fails with NIXL_ERR_BACKEND.",
            "Keep one: take the system's UCX out of LD_LIBRARY_PATH for the engines (or remove "
            "it). NIXL_LOG_LEVEL=INFO must show 'bound to UCX' with a path inside the NIXL wheel.",
        )


def _nixl_missing(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, NIXL_MISSING)
    for leg in evidence.legs:
        both = [n for n in ("nixl-cu12", "nixl-cu13") if leg.versions and n in leg.versions]
        if len(both) == 2 and not found and leg.versions:
            yield Finding(
                leg.name,
                "likely",
                tuple(Excerpt(f"{leg.name}/versions.txt", f"{n} {leg.versions[n]}") for n in both),
                "NIXL is installed for two CUDA releases at once; one overwrites files of the "
                "other, and the wrong plugin may be loaded.",
                "Keep the one that fits torch.version.cuda: pip uninstall nixl-cu12.",
                severity="warning",
            )
        half = [n for n in ("nixl-cu12", "nixl-cu13") if leg.versions and n in leg.versions]
        if len(half) == 1 and not found and leg.versions and "nixl" not in leg.versions:
            yield Finding(
                leg.name,
                "possible",
                (Excerpt(f"{leg.name}/versions.txt", f"{half[0]} {leg.versions[half[0]]}"),),
                f"{half[0]} is installed without the package nixl that vLLM imports.",
                "pip install nixl of the same version.",
                severity="info",
            )
    if found:
        library = found.value("library")
        wheels = [
            Excerpt(f"{leg.name}/versions.txt", f"{name} {text}")
            for leg in evidence.legs
            for name, text in (leg.versions or {}).items()
            if name.startswith(("nixl", "torch", "cuda"))
        ]
        yield Finding(
            found.leg,
            "certain",
            (*found.excerpts[:2], *wheels[:2]),
            f"NIXL's wheel is built for another CUDA than this environment has ({library} is "
            "missing)."
            if library
            else "NIXL cannot be imported: it is not installed beside vLLM, or only one of its two "
            "packages is (nixl and nixl-cu12 or nixl-cu13), or for another CUDA.",
            "pip install 'nixl[cu13]' (or cu12, as torch.version.cuda says) into the engine's "
            "environment and remove the other: pip uninstall nixl-cu12. Check: python -c 'import "
            "nixl._api'.",
        )


def _unknown_backend(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, UNKNOWN_BACKEND)
    if found:
        name = found.value("backend")
        yield Finding(
            found.leg,
            "certain",
            found.excerpts,
            f"There is no NIXL backend called {name}: it is skipped with a line in the log and the "
            "engine fails later, when it registers memory.",
            "Name one that NIXL has in kv_connector_extra_config.backends: LIBFABRIC (EFA) or UCX.",
        )


CHECKS = (
    Check(
        "PD6501",
        "libnuma ends the process",
        Category.VERSION_SKEW,
        "error",
        "nixl-aborts-on-libnuma",
        _libnuma,
        needs=("log|commands",),
        patterns=(LIBNUMA,),
        explains=("PD8505",),
    ),
    Check(
        "PD6502",
        "A NIXL plugin cannot be loaded",
        Category.VERSION_SKEW,
        "error",
        "nixl-plugin-not-loadable",
        _plugin,
        needs=("log|commands",),
        patterns=(MISSING_LIBRARY, BACKEND_UNSUPPORTED, *LOG_SETTINGS),
        premises=("PD6503",),
        explains=("PD1015", "PD2006", "PD2009", "PD6508", "PD8505"),
    ),
    Check(
        "PD6503",
        "libfabric is too old",
        Category.VERSION_SKEW,
        "error",
        "libfabric-too-old",
        _old_libfabric,
        needs=("log|commands",),
        patterns=(OLD_SYMBOLS, BACKEND_UNSUPPORTED),
        explains=("PD6502", "PD1015", "PD2006", "PD2009", "PD8505"),
    ),
    Check(
        "PD6504",
        "Two copies of UCX",
        Category.VERSION_SKEW,
        "error",
        "two-ucx-copies",
        _two_ucx,
        needs=("log|commands",),
        patterns=(BOUND_UCX, BACKEND_ERROR),
        explains=("PD1015", "PD2009"),
    ),
    Check(
        "PD6508",
        "NIXL is missing or for another CUDA",
        Category.VERSION_SKEW,
        "error",
        "nixl-missing",
        _nixl_missing,
        needs=("log|commands|versions",),
        patterns=(NIXL_MISSING,),
        explains=("PD8505", "PD1015"),
    ),
    Check(
        "PD6510",
        "No such NIXL backend",
        Category.VERSION_SKEW,
        "error",
        "backend-name-unknown",
        _unknown_backend,
        needs=("log",),
        patterns=(UNKNOWN_BACKEND,),
        explains=("PD1015", "PD6502", "PD8505"),
    ),
)
