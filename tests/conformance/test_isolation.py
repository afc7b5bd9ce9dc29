"""Nothing of one tenant reaches another, nothing of the engines reaches a client."""

import pytest

from tests.conformance.rig import Rig


@pytest.mark.usefixtures("needs_readback")
def test_two_tenants_with_one_conversation_id(rig: Rig) -> None:
    alice = rig.chat(authorization="Bearer alice")
    alice.say()
    mallory = alice.copy()
    mallory.authorization = "Bearer mallory"
    before = rig.readbacks
    assert mallory.say().status == 200
    assert rig.readbacks == before


def test_a_clients_own_transfer_parameters_go_nowhere(rig: Rig) -> None:
    victim = rig.chat()
    victim.say()
    stolen = rig.decode[0].handles + rig.decode[1].handles
    before = rig.readbacks
    answer = rig.chat().say(kv_transfer_params=stolen[-1])
    assert answer.status in (200, 400)
    assert rig.readbacks == before
    sent = [body.get("kv_transfer_params") or {} for e in rig.engines for body in e.requests]
    used = {str(params.get("remote_request_id")) for params in sent}
    assert str(stolen[-1]["remote_request_id"]) not in used


@pytest.mark.parametrize("stream", [True, False])
def test_no_handle_reaches_a_client(rig: Rig, stream: bool) -> None:
    chat = rig.chat(stream=stream)
    seen = b""
    for _ in range(2):
        answer = chat.say()
        seen += answer.raw + repr(answer.headers).encode()
    assert [secret for secret in rig.secrets if secret.encode() in seen] == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_engine_shows_in_an_error(rig: Rig, role: str) -> None:
    for engine in getattr(rig, role):
        engine.faults.extend([500] * 8)
    answer = rig.chat(stream=False).say()
    seen = answer.raw + repr(answer.headers).encode()
    assert answer.status >= 500 or role == "prefill"
    assert [secret for secret in rig.secrets if secret.encode() in seen] == []
