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


def sparse(name: str, size: int) -> tarfile.TarInfo:
    """A member that says to be ``size`` zeros and holds none."""
    member = tarfile.TarInfo(name)
    member.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": name,
        "GNU.sparse.size": str(size),
        "GNU.sparse.map": f"{size},0",
    }
    return member


def test_a_sparse_member_of_terabytes_is_refused(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "b.tar.gz", {"router-0/log.txt": TCP.encode()}, sparse("p/log.txt", 2 << 40)
    )
    ended = doctor(path, "-o", "json")
    assert found(ended) == ["PD1004"]
    assert "sparse" in json.loads(ended.out)["gaps"][0]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_logs_and_variables_in_the_encodings_of_windows(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    for name, text in {
        "router-0/log.txt": TCP * 100_000 + TCP,
        "decode-0/env.txt": "NIXL_TELEMETRY_ENABLE=n\n",
    }.items():
        path = tmp_path / "b" / name
        path.parent.mkdir(parents=True)
        path.write_bytes((mark + text).encode(encoding))
    assert set(found(doctor(tmp_path / "b", "-o", "json"))) == {"PD1004", "PD7502"}


@pytest.mark.parametrize("unit", ['{"a":', "a1:", "/a", "["])
def test_a_line_without_end_in_a_small_file(tmp_path: Path, unit: str) -> None:
    """Each is slow to search for a pattern that may begin anywhere in it, or deep."""
    text = unit * 100_000
    for name, head in {
        "http/1.txt": "HTTP/1.1 200 OK\n\n",
        "http/2.txt": "POST /v1/chat/completions\n\n",
        "commands/1.txt": "$ pdctl status x --json\n",
        "config.txt": "--kv-transfer-config ",
        "settings.json": "",
        "env.txt": "A=",
    }.items():
        path = tmp_path / "b" / "decode-0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + text)
    ended = doctor(tmp_path / "b", "-o", "json")
    unknown = json.loads(ended.out)["unknown"]
    assert [each for each in unknown if "the check failed" in each["missing"]] == []


def test_numbers_that_are_none(tmp_path: Path) -> None:
    """Digits without end, and dots where a number should stand, fail no check."""
    load = "Engine 000: Avg prompt throughput: {0} tokens/s, Running: {0} reqs, Waiting: {0} reqs, "
    load += "GPU KV cache usage: {0}%, Prefix cache hit rate: {0}%, External prefix cache hit "
    load += "rate: {0}%\nKV Transfer metrics: Num successful transfers={0}, Avg MB per "
    load += "transfer={0}, Throughput (MB/s)={0}, Avg number of descriptors={0}\n"
    load += "turn={0} conversation=none\nFailing {0} request(s) due to KV load failure\n"
    files = tmp_path / "b" / "decode-0"
    (files / "http").mkdir(parents=True)
    numbers = ("9" * 5000, "..", "\u00b2", "\u0663", "1e999")
    (files / "log.txt").write_text("".join(load.format(each) * 3 for each in numbers))
    for place, number in enumerate(numbers):
        usage = '{"usage":{"prompt_tokens":%s,"prompt_tokens_details":{"cached_tokens":%s}}}'
        (files / "http" / f"{place}.txt").write_text(usage % (number, number))
    (files / "metrics.txt").write_text(
        'vllm:cache_config_info{block_size="\u00b2",num_gpu_blocks="\u00b2"} 1\n'
        "pd_engine_blocks 1e999\nvllm:kv_cache_usage_perc NaN\n"
    )
    unknown = json.loads(doctor(tmp_path / "b", "-o", "json").out)["unknown"]
    assert [each for each in unknown if "the check failed" in each["missing"]] == []
