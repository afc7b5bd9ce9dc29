"""Two turns over NIXL's LIBFABRIC backend on a machine without EFA: they pass, over tcp, and the
legs say so.

usage: pip download --no-deps mpich==5.0.2 && \\
       python -m benchmarks.connector.libfabric_tcp mpich-5.0.2-*.whl   (from the repository's root)

Without an EFA device NIXL falls back to tcp and does not tell. Needs libhwloc15, gcc, and a network
interface besides lo. The wheel's libfabric is newer than most distributions' (NIXL's plugin wants
symbol version FABRIC_1.7); libcuda.so.1, which the plugin links, is a stand-in made here.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.e2e import legs
from tests.e2e.conftest import CANARY, PDCTL, Deployment

from pd_connector.contract import Outcome
from pdctl.conversation import user_text

FAKE_CUDA = """
int cuCtxSetCurrent(void *context) { return 100; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { return 100; }
int cuPointerGetAttributes(unsigned n, void *a, void **d, unsigned long long p) { return 100; }
"""
"""The three functions that the plugin takes from CUDA's driver; 100 is CUDA_ERROR_NO_DEVICE."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="the mpich wheel")
    wheel = parser.parse_args().wheel
    if not (CANARY / "config.json").is_file():
        subprocess.run([str(PDCTL), "canary", str(CANARY)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder))
        deployment.spec["kv_transfer"]["backend"] = "LIBFABRIC"
        deployment.spec["fabric"] = {"env": {"FI_TCP_IFACE": interface()}}
        libraries = ":".join(map(str, (libfabric(wheel, Path(folder)), fake_cuda(Path(folder)))))
        deployment.spec["engine"]["env"] |= {"LD_LIBRARY_PATH": libraries}
        deployment.write()
        try:
            # pdctl's own checks would refuse to start without EFA.
            deployment.pdctl("up", "SPEC", "--bidir", "on", "--skip-checks")
            return 0 if two_turns(deployment) else 1
        finally:
            deployment.pdctl("down", deployment.name, "--grace", "5", ok=False)


def two_turns(deployment: Deployment) -> bool:
    history = user_text("libfabric", 1000)
    answer, _, handle = legs.turn(deployment, history, tokens=32)
    prompt = history + answer + " and then?"
    text, reuse, _ = legs.turn(deployment, prompt, handle, 32)
    right = text == legs.plain(deployment, prompt, 32)
    print(f"turn 2: {json.dumps(reuse)}; answer {'right' if right else 'WRONG'}")
    told = True
    for leg, url in (("prefill", deployment.prefill_url), ("decode", deployment.decode_url)):
        found = legs.settings(deployment, url)
        facts = {name: found[name] for name in ("backends", "provider", "rails", "rdma_devices")}
        print(f"{leg}: {json.dumps(facts)}")
        told &= found["provider"] == "tcp"
    return right and told and reuse["outcome"] == Outcome.HIT.value


def interface() -> str:
    """libfabric's tcp provider listens on no loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    up = [n for n in names if n != "lo" and _state(n) in ("up", "unknown")]
    if not up:
        raise SystemExit("there is no network interface besides lo")
    return up[0]


def _state(name: str) -> str:
    return Path(f"/sys/class/net/{name}/operstate").read_text().strip()


def libfabric(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "mpich")
    return next((folder / "mpich").rglob("libfabric.so.1")).parent


def fake_cuda(folder: Path) -> Path:
    (folder / "cuda.c").write_text(FAKE_CUDA)
    target = folder / "fake_cuda"
    target.mkdir()
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-o",
        str(target / "libcuda.so.1"),
        str(folder / "cuda.c"),
    ]
    subprocess.run(command, check=True)
    return target


if __name__ == "__main__":
    sys.exit(main())
