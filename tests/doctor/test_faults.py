"""Legs that are started wrong on purpose: the fault is the first finding, and the last one's traces
are gone when it is mended. Fake engines here; benchmarks/doctor/live_faults.py has real ones."""

import socket
from collections.abc import Iterator

import pytest

from tests.doctor.faulty import Faulty, with_config, with_env, with_router, with_transfer

P, D, R = "prefill-0", "decode-0", "router-0"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with pytest.MonkeyPatch.context() as patch:
        # The rig sets it for the launcher that runs in this process.
        patch.setenv("PDCTL_STATE_DIR", "")
        place = Faulty(tmp_path_factory.mktemp("faulty"), fake=True)
        try:
            for name in (P, D, R):
                place.start(place.leg(name))
            yield place
        finally:
            place.stop_all()


def test_turns_without_a_conversation_id_are_told_of(place: Faulty) -> None:
    """The router finds the turn before by its text: worth knowing, and no fault."""
    place.turns(3, None)
    found = place.doctor()
    assert [each["code"] for each in found.findings][:1] == ["PD5501"]
    assert found.bad() == []


def test_faults_of_the_decode_leg(place: Faulty) -> None:
    good = place.leg(D)
    unplugged = with_env(good, VLLM_PLUGINS="none")
    stock = with_config(unplugged, kv_connector_module_path=None, kv_load_failure_policy="fail")
    faults = {
        "a TTL of 2 s": (with_transfer(good, decoder_kv_blocks_ttl=2), "PD4060"),
        "plugin missing": (unplugged, "PD6003"),
        "stock streaming": (stock, "PD6003"),
        "bidirectional off": (place.leg(D, False), "PD3007"),
        "NIXL telemetry off": (with_env(good, NIXL_TELEMETRY_ENABLE="n"), "PD7502"),
    }
    found = {}
    for name, (leg, _) in faults.items():
        place.start(leg)
        found[name] = place.doctor().bad()[:1]
    assert found == {name: [code] for name, (_, code) in faults.items()}
    place.start(good)
    assert place.doctor().bad() == []


def test_faults_of_the_prefill_leg(place: Faulty) -> None:
    place.start(with_transfer(place.leg(P), kv_recompute_threshold=100_000))
    assert place.doctor().bad()[:1] == ["PD4508"]
    place.start(place.leg(P, False))
    assert place.doctor().bad()[:1] == ["PD3007"]
    place.start(place.leg(P))


def test_a_router_that_keeps_handles_too_long(place: Faulty) -> None:
    place.start(with_router(place.leg(R), handle_ttl=900.0, decode_ttl=1000.0))
    assert place.doctor().bad() == ["PD4003"]
    place.start(place.leg(R))


def test_decode_restarted_under_the_same_id(place: Faulty) -> None:
    fixed = with_config(place.leg(D), engine_id="decode-engine-001")
    place.start(fixed)
    place.start(fixed)
    assert place.doctor().bad()[:1] == ["PD8501"]
    # Back under an id of its own, it is no longer mistaken for the one before.
    place.start(place.leg(D))
    assert place.doctor().bad() == []


def test_starts_that_cannot_succeed(place: Faulty) -> None:
    good = place.leg(D)
    place.start(with_env(good, VLLM_NIXL_SIDE_CHANNEL_HOST="10.255.255.1"), healthy=False)
    assert place.doctor().bad()[0] == "PD2011"
    place.stop(D)
    with socket.create_server(good.listens[1]):
        place.start(good, healthy=False)
        assert place.doctor().bad()[0] == "PD2002"
    place.start(good)
    assert place.doctor().bad() == []
