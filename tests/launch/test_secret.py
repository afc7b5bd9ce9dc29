"""The secret that pdctl up makes for the legs it starts."""

import os
import stat
from pathlib import Path

from .conftest import Place


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_all_legs_share_one_that_only_its_owner_can_read(place: Place) -> None:
    place.pdctl("up", "SPEC")
    secret = place.folder / "state" / place.name / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    text = secret.read_text()
    assert len(text) == 64
    for name, pid in place.pids().items():
        assert environment(pid)["PD_SECRET_FILE"] == str(secret), name
        command = Path(f"/proc/{pid}/cmdline").read_text()
        assert text not in command
    state = secret.parent
    assert not any(text in file.read_text() for file in state.glob("*.*"))

    place.pdctl("down", place.name)
    place.pdctl("up", "SPEC")
    assert secret.read_text() == text
    place.pdctl("down", place.name)


def test_the_specs_own_is_taken_instead(place: Place) -> None:
    own = place.folder / "own-secret"
    own.write_text("f" * 64)
    place.spec["kv_transfer"]["secret_file"] = str(own)
    place.write()
    place.pdctl("up", "SPEC")
    for pid in place.pids().values():
        assert environment(pid)["PD_SECRET_FILE"] == str(own)
    place.pdctl("down", place.name)


def test_the_callers_own_is_taken_instead(place: Place) -> None:
    own = place.folder / "callers-secret"
    own.write_text("f" * 64)
    os.environ["PD_SECRET_FILE"] = str(own)
    try:
        place.pdctl("up", "SPEC")
        for pid in place.pids().values():
            assert environment(pid)["PD_SECRET_FILE"] == str(own)
        place.pdctl("down", place.name)
    finally:
        del os.environ["PD_SECRET_FILE"]
