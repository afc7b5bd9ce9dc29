"""Only handles that a leg of the same deployment made are taken, and each once."""

import json
from pathlib import Path
from typing import Any

import pytest

from pd_connector.contract import PD_SIGNATURE, SECRET_FILE_VARIABLE
from pd_connector.secret import SecretError, derived_key, load_secret
from pd_connector.signature import SIGNED, Signer, UsedHandles

SIGNER = Signer(b"s" * 32)
HANDLE: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": ([1, 2, 3],),
    "remote_engine_id": "decode-0",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 300,
    "remote_blocks_expiry_time": 1234.0,
    "tp_size": 1,
    "pd_tokens": {"v": 2, "n": 300},
    "pd_lease": {"v": 1},
}


def signed(signer: Signer = SIGNER) -> dict[str, Any]:
    return {**HANDLE, PD_SIGNATURE: signer.sign(HANDLE)}


def test_a_handle_is_taken_as_it_comes_back_over_json() -> None:
    back = json.loads(json.dumps(signed()))
    assert SIGNER.refusal(back) is None
    assert SIGNER.refusal({**back, "remote_blocks_expiry_time": 1234}) is None
    assert SIGNER.refusal(dict(reversed(list(back.items())))) is None
    assert SIGNER.refusal({**back, "pd_reuse": {"outcome": "hit"}}) is None


@pytest.mark.parametrize("field", SIGNED)
def test_no_signed_field_can_be_changed_or_left_out(field: str) -> None:
    handle = signed()
    assert SIGNER.refusal({**handle, field: "x"}) == "altered"
    left_out = {key: value for key, value in handle.items() if key != field}
    assert SIGNER.refusal(left_out) == ("altered" if HANDLE.get(field) is not None else None)


@pytest.mark.parametrize(
    ("signature", "refusal"),
    [
        (None, "unsigned"),
        ("", "forged"),
        ("letmein", "forged"),
        (7, "forged"),
        ("2.00000000.AAAA", "forged"),
        ("1.00000000.", "forged"),
        ("1.00000000.AAAA", "foreign"),
        ("1.ünï.AAAA", "forged"),
    ],
)
def test_other_signatures_are_refused(signature: object, refusal: str) -> None:
    assert SIGNER.refusal({**HANDLE, PD_SIGNATURE: signature}) == refusal


def test_another_deployments_handle_is_foreign() -> None:
    assert SIGNER.refusal(signed(Signer(b"t" * 32))) == "foreign"


def test_a_signature_tells_nothing_of_the_secret() -> None:
    assert b"s" * 4 not in SIGNER.sign(HANDLE).encode()
    assert derived_key(b"s" * 32, b"a") != derived_key(b"s" * 32, b"b")


def test_a_used_handle_is_remembered_for_its_time() -> None:
    used = UsedHandles(seconds=10)
    assert HANDLE not in used
    used.add(HANDLE, now=0)
    assert HANDLE in used
    assert {**HANDLE, "remote_block_ids": [[9]]} in used
    assert {**HANDLE, "remote_request_id": "cmpl-2"} not in used
    used.add({**HANDLE, "remote_request_id": "cmpl-2"}, now=9.5)
    assert HANDLE in used
    used.add({**HANDLE, "remote_request_id": "cmpl-3"}, now=11)
    assert HANDLE not in used


def test_the_memory_of_used_handles_is_bounded() -> None:
    used = UsedHandles(seconds=1e9, most=3)
    for number in range(5):
        used.add({**HANDLE, "remote_request_id": str(number)}, now=number)
    kept = [n for n in range(5) if {**HANDLE, "remote_request_id": str(n)} in used]
    assert kept == [2, 3, 4]


def test_the_secret_is_read_from_the_file_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a" * 64 + "\n")
    assert load_secret({SECRET_FILE_VARIABLE: str(file)}) == b"a" * 64
    assert load_secret({}) is None
    assert load_secret({SECRET_FILE_VARIABLE: ""}) is None


def test_a_secret_that_cannot_be_used_is_an_error_without_the_secret(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="No such file"):
        load_secret({SECRET_FILE_VARIABLE: str(tmp_path / "none")})
    (tmp_path / "short").write_text("hunter2")
    with pytest.raises(SecretError, match="7 bytes, at least 32") as error:
        load_secret({SECRET_FILE_VARIABLE: str(tmp_path / "short")})
    assert "hunter2" not in str(error.value)
