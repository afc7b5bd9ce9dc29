"""Bundles that are broken or mean harm: a refusal or a partial answer, and nothing written."""

import gzip
import io
import json
import os
import random
import tarfile
import time
from pathlib import Path

import pytest

from tests.cli import Ended, pdctl

TCP = "INFO NET/OFI Selected Provider is tcp (found 1 nics)\n"


def doctor(path: Path, *words: str) -> Ended:
    ended = pdctl("doctor", "--bundle", str(path), *words)
    assert "Traceback" not in ended.out + ended.err
    return ended


def found(ended: Ended) -> list[str]:
    return [each["code"] for each in json.loads(ended.out)["findings"]]


def tar(path: Path, files: dict[str, bytes], *more: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in more:
            archive.addfile(member)
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member


@pytest.fixture
def before_and_after(tmp_path: Path) -> Path:
    """A folder that nothing may write to."""
    folder = tmp_path / "watched"
    folder.mkdir()
    return folder


def test_members_that_point_outside_are_refused_and_the_rest_is_read(
    tmp_path: Path, before_and_after: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(before_and_after)
    path = tar(
        tmp_path / "b.tar.gz",
        {
            "../../evil/log.txt": b"x\n",
            "/etc/evil/log.txt": b"x\n",
            "prefill-0/log.txt": TCP.encode(),
        },
        link("decode-0/log.txt", "/etc/passwd"),
        link("decode-0/env.txt", "prefill-0/log.txt", tarfile.LNKTYPE),
        link("decode-0/http/1.txt", "", tarfile.FIFOTYPE),
    )
    ended = doctor(path, "-o", "json")
    report = json.loads(ended.out)
    assert ended.code == 1
    assert [each["leg"] for each in report["findings"]] == ["prefill-0"]
    gaps = "\n".join(report["gaps"])
    assert gaps.count("points outside") == 2
    assert gaps.count("not a regular file") == 3
    assert list(before_and_after.iterdir()) == []
    assert not (tmp_path.parent / "evil").exists()


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(TCP)
    leg = tmp_path / "b" / "prefill-0"
    leg.mkdir(parents=True)
    (leg / "log.txt").symlink_to(secret)
    (leg / "env.txt").write_text("A=b\n")
    (tmp_path / "b" / "loop").symlink_to(tmp_path / "b")
    os.mkfifo(leg / "metrics.txt")
    ended = doctor(tmp_path / "b", "-o", "json")
    assert ended.code == 0
    assert found(ended) == []


def test_a_decompression_bomb_is_refused_in_flat_time(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.gz"
    zeros = gzip.compress(b"\0" * (16 << 20), 9)
    leg = tmp_path / "b" / "prefill-0"
    leg.mkdir(parents=True)
    with (leg / "log.txt.1.gz").open("wb") as log:
        for _ in range(200):
            log.write(zeros)
    (leg / "log.txt").write_text(TCP)
    bomb.touch()
    begin = time.process_time()
    ended = doctor(tmp_path / "b", "-o", "json")
    assert "PD1" in "".join(found(ended))
    assert "decompression bomb" in "\n".join(json.loads(ended.out)["gaps"])
    assert time.process_time() - begin < 60


def test_a_huge_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    with gzip.open(path, "wb", 1) as packed:
        member = tarfile.TarInfo("x")
        member.type = tarfile.XHDTYPE
        member.size = 1 << 33
        packed.write(member.tobuf(tarfile.GNU_FORMAT))
        for _ in range(64):
            packed.write(b"1" * (1 << 20))
    ended = doctor(path)
    assert ended.code == 2
    assert "is not a bundle" in ended.err


def test_one_line_of_100_megabytes(tmp_path: Path) -> None:
    leg = tmp_path / "b" / "prefill-0"
    leg.mkdir(parents=True)
    with (leg / "log.txt").open("wb") as log:
        for _ in range(100):
            log.write(b"x" * (1 << 20))
        log.write(TCP.encode())
    ended = doctor(tmp_path / "b", "-o", "json")
    assert found(ended)[0].startswith("PD1")
    assert len(ended.out) < 100_000


def test_escapes_reach_no_terminal(tmp_path: Path) -> None:
    leg = tmp_path / "b" / "prefill-0"
    leg.mkdir(parents=True)
    (leg / "log.txt").write_text(f"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e{TCP}")
    for words in ([], ["-o", "markdown"], ["-o", "json"]):
        ended = doctor(tmp_path / "b", *words)
        assert ended.code == 1
        assert not any(c in ended.out for c in "\x1b\x07\x9b\u202e")
        assert "Selected Provider is tcp" in ended.out


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
def test_a_bundle_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path, kept: float) -> None:
    noise = random.Random(1).randbytes(300_000)
    whole = tar(
        tmp_path / "whole.tar.gz",
        {"prefill-0/log.txt": TCP.encode(), "decode-0/log.txt": noise},
    ).read_bytes()
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole[: int(len(whole) * kept)])
    ended = doctor(cut, "-o", "json")
    assert found(ended)[0].startswith("PD1")
    assert "what came before it was read" in "\n".join(json.loads(ended.out)["gaps"])


def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    leg = tmp_path / "b" / "prefill-0"
    leg.mkdir(parents=True)
    packed = gzip.compress(TCP.encode() + random.Random(1).randbytes(300_000))
    (leg / "log.txt.gz").write_bytes(packed[:150_000])
    ended = doctor(tmp_path / "b", "-o", "json")
    assert found(ended)[0].startswith("PD1")
    assert "what came before it was read" in "\n".join(json.loads(ended.out)["gaps"])


def test_rotated_and_packed_logs_are_one_log(tmp_path: Path) -> None:
    leg = tmp_path / "b" / "prefill-0"
    leg.mkdir(parents=True)
    (leg / "log.txt").write_text("newest\n")
    (leg / "log.txt.1").write_text("older\n")
    (leg / "log.txt.2.gz").write_bytes(gzip.compress(TCP.encode()))
    report = json.loads(doctor(tmp_path / "b", "-o", "json").out)
    assert report["findings"][0]["evidence"][0]["source"] == "prefill-0/log.txt.2.gz:1"


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 4096, b"hello", b"\x1f\x8b\x08broken", b"PK\x03\x04zip", os.urandom(5000)],
    ids=["empty", "zeros", "text", "gzip", "zip", "noise"],
)
def test_what_is_no_bundle_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_bytes(content)
    ended = doctor(path)
    assert ended.code == 2
    assert len(ended.err.strip().splitlines()) == 1
    assert str(path) in ended.err


def test_no_bundle_and_an_empty_one(tmp_path: Path) -> None:
    assert doctor(tmp_path / "missing").code == 2
    (tmp_path / "b").mkdir()
    ended = doctor(tmp_path / "b")
    assert ended.code == 2
    assert "holds no evidence" in ended.err


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle.yaml").write_text("format: pdctl-bundle/9\n")
    ended = doctor(tmp_path)
    assert ended.code == 2
    assert "pdctl-bundle/9" in ended.err


def test_every_part_may_be_noise(tmp_path: Path) -> None:
    noise = random.Random(3)
    leg = tmp_path / "prefill-0"
    for folder in ("http", "commands"):
        (leg / folder).mkdir(parents=True)
    for name in (
        "log.txt metrics.txt env.txt config.txt versions.txt settings.json http/1.txt "
        "commands/1.txt"
    ).split():
        (leg / name).write_bytes(noise.randbytes(20_000))
    (tmp_path / "deployment").mkdir()
    (tmp_path / "deployment" / "spec.yaml").write_bytes(noise.randbytes(2_000))
    (tmp_path / "deployment" / "model.json").write_text("[" * 100_000)
    (tmp_path / "bundle.yaml").write_bytes(noise.randbytes(2_000))
    ended = doctor(tmp_path, "-o", "json")
    assert ended.code in (0, 1)
    assert not [u for u in json.loads(ended.out)["unknown"] if "check failed" in u["missing"]]


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b]\n"
        "d: &d [*c, *c, *c, *c, *c, *c]\ne: &e [*d, *d, *d, *d, *d, *d]\n"
        "f: &f [*e, *e, *e, *e, *e, *e]\ng: {k: [*f, *f, *f, *f, {z: *f}]}\n",
        "[" * 50_000,
        "{" * 50_000,
        "--a " * 50_000,
        "a: " * 20_000,
        "--x '" + "{" * 60_000 + "'",
    ],
    ids=["aliases", "lists", "maps", "flags", "keys", "json flag"],
)
def test_settings_that_explode(tmp_path: Path, text: str) -> None:
    (tmp_path / "prefill-0").mkdir()
    (tmp_path / "prefill-0" / "config.txt").write_text(text)
    begin = time.process_time()
    assert doctor(tmp_path, "-o", "json").code in (0, 1, 2)
    assert time.process_time() - begin < 30
