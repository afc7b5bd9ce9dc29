"""A real prefill/decode pair broken on purpose, one fault after the other: what pdctl doctor finds.

usage: python benchmarks/doctor/live_faults.py [STAGE ...] [--keep FOLDER] [--mpich WHEEL]

Stages: sides, load, decode, restarted, stock, prefill, failing, libfabric, fallback. The last one
needs a libfabric 2.x, which is in PyPI's mpich wheel (`pip download --no-deps mpich==5.0.2`),
libhwloc15 and a C compiler.
Every row is one fault: what doctor found first,
the rest, seconds. Exits 1 when a fault is not the first finding, a healthy deployment has an error
or a warning, the live and the collected answer differ, or doctor takes 10 s.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.doctor.faulty import (
    PDCTL,
    Diagnosed,
    Faulty,
    with_config,
    with_env,
    with_router,
    with_transfer,
)

from pdctl.cli.common import interrupt_on_hangup
from pdctl.plan import Leg

LIMIT_SECONDS = 10.0
SOON: dict[str, object] = {"kv_transfer.decode_ttl": "100s", "router.handle_ttl": "90s"}
P, D, R = "prefill-0", "decode-0", "router-0"


class Table:
    """Rows as they come, and what was not as it should be."""

    def __init__(self, keep: Path | None, wheel: Path | None, fake: bool) -> None:
        self.fake = fake
        self.wheel = wheel
        self.failed: list[str] = []
        self._keep = keep

    def row(self, name: str, place: Faulty, *expected: str, information: bool = False) -> None:
        """Run doctor; ``expected`` are the codes that may stand first, none for a healthy one."""
        found = place.doctor()
        bad = [each["code"] for each in found.findings] if information else found.bad()
        good = (
            bad[:1] == list(expected)[:1] or (bad and bad[0] in expected) or not (bad or expected)
        )
        good = good and found.seconds < LIMIT_SECONDS
        same = self._same(name, place, found)
        if not (good and same):
            self.failed.append(name)
        print(
            f"{'ok  ' if good and same else 'FAIL'} {name:<44} first {bad[0] if bad else '-':<7} "
            f"then {','.join(bad[1:]) or '-':<24} {found.seconds:5.1f} s"
            f"{'' if same else '  bundle differs'}",
            flush=True,
        )
        if not good:
            for each in found.findings:
                print(f"       {each['severity']} {each['code']} {each['leg']}: {each['cause']}")
                for piece in each["evidence"][:2]:
                    print(f"         {piece['source']}: {piece['excerpt'][:200]}", flush=True)

    def _same(self, name: str, place: Faulty, live: Diagnosed) -> bool:
        """Whether a bundle collected now gives the live answer."""
        folder = self._keep or place.folder
        bundle = folder / f"{name.replace(' ', '-').replace('/', '-')}.tar.gz"
        subprocess.run(
            [str(PDCTL), "collect", str(place.spec_file), "-o", str(bundle)],
            check=True,
            capture_output=True,
        )
        done = subprocess.run(
            [str(PDCTL), "doctor", "--bundle", str(bundle), "-o", "json"],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            print(done.stderr)
            return False
        offline = Diagnosed(json.loads(done.stdout), done.returncode, 0.0)
        return offline.bad() == live.bad()


@contextmanager
def deployment(table: Table, changes: dict[str, object] | None = None) -> Iterator[Faulty]:
    with tempfile.TemporaryDirectory(prefix="doctor-live-") as folder:
        place = Faulty(Path(folder), changes, table.fake)
        try:
            yield place
        finally:
            place.stop_all()


def timed(what: str, act: Callable[[], None]) -> None:
    begin = time.monotonic()
    act()
    print(f"     ({what}: {time.monotonic() - begin:.0f} s)", flush=True)


def pair(place: Faulty, prefill: Leg, decode: Leg) -> None:
    """Start both at once."""
    threads = [Thread(target=place.start, args=(leg,)) for leg in (prefill, decode)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sides(table: Table) -> None:
    """Healthy, the four combinations of bidirectional, and what only needs other traffic."""
    with deployment(table, SOON) as place:
        timed("start", lambda: pair(place, place.leg(P), place.leg(D)))
        place.start(place.leg(R))
        table.row("healthy, just started", place)
        place.turns(3, None)
        # The router finds the turn before by its text, so it is told as information.
        table.row("no conversation id", place, "PD5501", information=True)
        place.start(place.leg(R))
        place.turns(4)
        table.row("healthy, after turns (on/on)", place)
        place.start(with_router(place.leg(R), handle_ttl=900.0, decode_ttl=1000.0))
        table.row("router TTL above decode's", place, "PD4003")
        place.start(place.leg(R))
        timed("decode off", lambda: place.start(place.leg(D, False)))
        table.row("bidirectional on/off", place, "PD3007")
        place.turns(3)
        table.row("bidirectional on/off, after turns", place, "PD3007")
        timed("prefill off", lambda: place.start(place.leg(P, False)))
        place.spec["kv_transfer"]["bidirectional"] = False
        place.write()
        place.start(place.leg(R))
        table.row("healthy, off on purpose (off/off)", place)
        place.turns(3)
        table.row("healthy, off on purpose, after turns", place)
        place.spec["kv_transfer"]["bidirectional"] = True
        place.write()
        timed("decode on", lambda: place.start(place.leg(D)))
        place.start(place.leg(R))
        table.row("bidirectional off/on", place, "PD3007")


def load(table: Table) -> None:
    """A healthy pair that has more to do than it can."""
    with deployment(table, SOON) as place:
        timed("start", lambda: pair(place, place.leg(P), place.leg(D)))
        place.start(place.leg(R))
        place.turns(2)
        clients = [Thread(target=place.turns, args=(4,)) for _ in range(6)]
        for client in clients:
            client.start()
        table.row("healthy, loaded", place)
        print(f"     ({sum(client.is_alive() for client in clients)} of 6 clients at work)")
        for client in clients:
            client.join()
        table.row("healthy, idle after load", place)


def decode(table: Table) -> None:
    """Faults of the decode leg beside a good prefill leg."""
    with deployment(table, SOON) as place:
        timed(
            "start",
            lambda: pair(place, place.leg(P), with_transfer(place.leg(D), decoder_kv_blocks_ttl=2)),
        )
        place.start(place.leg(R))
        table.row("decode TTL of 2 s", place, "PD4060")
        timed(
            "telemetry off",
            lambda: place.start(with_env(place.leg(D), NIXL_TELEMETRY_ENABLE="n")),
        )
        table.row("NIXL telemetry off", place, "PD7502")
        timed("plugin missing", lambda: place.start(with_env(place.leg(D), VLLM_PLUGINS="none")))
        table.row("plugin missing", place, "PD6003")
        place.turns(3)
        table.row("plugin missing, after turns", place, "PD6003")


def restarted(table: Table) -> None:
    """A decode leg that comes back under the engine id of the one before."""
    with deployment(table, SOON) as place:
        fixed = with_config(place.leg(D), engine_id="decode-engine-001")
        timed("start", lambda: pair(place, place.leg(P), fixed))
        place.start(place.leg(R))
        place.turns(2)
        timed("restart under the same id", lambda: place.start(fixed))
        table.row("D restarted under the same id", place, "PD8501")
        place.turns(2)
        table.row("D restarted under the same id, after turns", place, "PD8501")


def stock(table: Table) -> None:
    """A decode leg as vLLM has it, without anything of ours."""
    with deployment(table, SOON) as place:
        stock = with_config(
            with_env(place.leg(D), VLLM_PLUGINS="none"),
            kv_connector_module_path=None,
            kv_load_failure_policy="fail",
        )
        timed("start", lambda: pair(place, place.leg(P), stock))
        place.start(place.leg(R))
        place.turns(3)
        table.row("stock streaming", place, "PD6003")


def prefill(table: Table) -> None:
    """Faults of the prefill leg."""
    with deployment(table, SOON) as place:
        high = with_transfer(place.leg(P), kv_recompute_threshold=100000)
        timed("start", lambda: pair(place, high, place.leg(D)))
        place.start(place.leg(R))
        table.row("threshold above every prompt", place, "PD4508")
        place.turns(3)
        table.row("threshold above every prompt, after turns", place, "PD4508")


def failing(table: Table) -> None:
    """Starts that cannot succeed."""
    with deployment(table) as place:
        leg = with_env(place.leg(D), VLLM_NIXL_SIDE_CHANNEL_HOST="10.255.255.1")
        timed("wrong host", lambda: place.start(leg, healthy=False))
        table.row("wrong side-channel host", place, "PD2011")
        host, port = place.leg(D).listens[1]
        with socket.create_server((host, port)):
            timed("port taken", lambda: place.start(place.leg(D), healthy=False))
            table.row("side-channel port taken", place, "PD2002", "PD8503")


def libfabric(table: Table) -> None:
    """LIBFABRIC on a machine without EFA and with a libfabric that is too old for NIXL."""
    with deployment(table, {"kv_transfer.backend": "LIBFABRIC"}) as place:
        timed("too old", lambda: place.start(place.leg(D), healthy=False))
        table.row("libfabric too old", place, "PD6503")


def fallback(table: Table) -> None:
    """LIBFABRIC without EFA, with a libfabric that NIXL's plugin takes."""
    if table.wheel is None:
        print("     (skipped: no --mpich)")
        return
    with tempfile.TemporaryDirectory(prefix="doctor-libfabric-") as folder:
        paths = ":".join(map(str, (new_libfabric(table.wheel, Path(folder)), fake_cuda(folder))))
        engine_env = {"HF_HUB_OFFLINE": 1, "VLLM_NO_USAGE_STATS": 1, "LD_LIBRARY_PATH": paths}
        changes: dict[str, object] = {
            "kv_transfer.backend": "LIBFABRIC",
            "engine.env": engine_env,
            "fabric": {"provider": "efa"},
        }
        with deployment(table, changes) as place:
            timed("efa demanded", lambda: place.start(place.leg(D), healthy=False))
            table.row("LIBFABRIC without EFA, FI_PROVIDER=efa", place, "PD1001")
        changes["fabric"] = {"env": {"FI_TCP_IFACE": interface()}}
        with deployment(table, changes) as place:
            timed("silent fallback", lambda: pair(place, place.leg(P), place.leg(D)))
            place.start(place.leg(R))
            place.turns(2)
            table.row("LIBFABRIC without EFA, silently on tcp", place, "PD1001", "PD1005")
            place.spec["fabric"]["provider"] = "tcp"
            place.write()
            timed("tcp on purpose", lambda: pair(place, place.leg(P), place.leg(D)))
            place.start(place.leg(R))
            place.turns(3)
            table.row("healthy, LIBFABRIC over tcp on purpose", place)


def interface() -> str:
    """libfabric's tcp provider listens on no loopback interface."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    return next(each for each in names if _state(each) in ("up", "unknown"))


def _state(interface: str) -> str:
    return Path("/sys/class/net", interface, "operstate").read_text().strip()


def new_libfabric(wheel: Path, folder: Path) -> Path:
    """libfabric 2.x out of the mpich wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/lib/mpich/" in name]
        archive.extractall(folder, names)
    return next(folder.glob("*.data/data/lib/mpich"))


def fake_cuda(folder: str) -> Path:
    """The three functions that NIXL's plugin takes from CUDA's driver; 100: there is no device."""
    made = Path(folder, "fake-cuda")
    made.mkdir()
    source = made / "cuda.c"
    source.write_text(
        "int cuCtxSetCurrent(void *c) { return 100; }\n"
        "int cuDeviceGetPCIBusId(char *id, int length, int device) { return 100; }\n"
        "int cuPointerGetAttributes(unsigned n, void *a, void **d, unsigned long long p)"
        " { return 100; }\n"
    )
    library = str(made / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(source)], check=True)
    return made


STAGES = {
    "sides": sides, "load": load, "decode": decode, "restarted": restarted, "stock": stock,
    "prefill": prefill, "failing": failing, "libfabric": libfabric, "fallback": fallback,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", default=list(STAGES))
    parser.add_argument("--keep", type=Path, help="folder for the collected bundles")
    parser.add_argument("--mpich", type=Path, help="wheel of mpich 5, for its libfabric")
    parser.add_argument(
        "--fake", action="store_true", help="with fake engines, to try this script itself"
    )
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    # Whoever ends this script ends what it has started.
    interrupt_on_hangup()
    table = Table(args.keep, args.mpich, args.fake)
    for stage in args.stages:
        print(f"== {stage}", flush=True)
        STAGES[stage](table)
    print(f"{len(table.failed)} not as expected: {', '.join(table.failed) or '-'}")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
