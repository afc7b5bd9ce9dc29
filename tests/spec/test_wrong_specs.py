"""What `pdctl validate` says about wrong specs, to the line and column."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli import pdctl

TABLE = yaml.safe_load(Path(__file__).with_name("wrong_specs.yaml").read_text())
BASE: str = TABLE["base"]
PDCTL = Path(sys.executable).with_name("pdctl")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(content: str | bytes) -> str:
    raw = content if isinstance(content, bytes) else content.encode()
    Path("spec.yaml").write_bytes(raw)
    return "spec.yaml"


def edited(*replace: tuple[str, str]) -> str:
    text = BASE
    for this, by in replace:
        assert this in text
        text = text.replace(this, by, 1)
    return text


def test_the_base_is_right() -> None:
    ended = pdctl("validate", write(BASE))
    assert (ended.code, ended.out, ended.err) == (0, "spec.yaml: ok\n", "")


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["what"].replace(" ", "-"))
def test_wrong_spec(row: dict) -> None:
    spec = write(edited(*((edit["this"], edit["by"]) for edit in row["replace"])))
    ended = pdctl("validate", spec)
    assert ended.lines == [f"spec.yaml:{line}" for line in row["says"]]
    assert (ended.code, ended.out) == (2, "")


def test_the_table_has_no_row_twice() -> None:
    names = [row["what"] for row in TABLE["rows"]]
    assert len(names) == len(set(names)) > 100


NINES = "9" * 5000
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 30)
)
FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "1:1: is empty; examples/laptop.yaml is a start"),
    "only-comments": ("# nothing\n", "1:1: is empty; examples/laptop.yaml is a start"),
    "list-at-the-top": (
        "# legs\n- a\n",
        "2:1: must be a mapping of keys to values (name: ...), not a list",
    ),
    "text-at-the-top": (
        "hello\n",
        "1:1: must be a mapping of keys to values (name: ...), not text",
    ),
    "number-at-the-top": (
        "3\n",
        "1:1: must be a mapping of keys to values (name: ...), not a single value",
    ),
    "latin-1": ("name: a\nmodel: é".encode("latin-1"), "2:8: is not UTF-8 text; save it as UTF-8"),
    "utf-16": ("name: a".encode("utf-16"), "1:1: is not UTF-8 text; save it as UTF-8"),
    "nul-byte": ("name: demo\nmodel: \0", "2:8: holds the control character '\\x00'; remove it"),
    "escape": ("name: \x1b[31m\n", "1:7: holds the control character '\\x1b'; remove it"),
    "over-1-mib": ("#" * (2 << 20), "1:1: is larger than 1 MiB; a spec is a small file"),
    "billion-laughs": (LAUGHS, "1:1: holds more than 100000 values; a spec is a small file"),
    "billion-merges": (MERGES, "1:1: holds more than 100000 values; a spec is a small file"),
    "deep-blocks": (
        "".join(f"{' ' * n}a:\n" for n in range(1000)),
        "65:65: is nested deeper than 64 levels",
    ),
    "deep-flow": ("a: " + "[" * 500, "1:67: is nested deeper than 64 levels"),
    "too-deep-to-parse": (
        "a: " + "[" * 100_000,
        "1:1003: is not valid YAML: while increasing flow level, exceeded maximum nesting depth",
    ),
    "integer-of-5000-digits": (
        edited(("id: org/model", f"id: {NINES}")),
        "3:7: YAML cannot read this value (Exceeds the limit (4300 digits) for integer string "
        "conversion: value has 5000 digits); if it is text, put it in quotes",
    ),
    "hexadecimal-of-5000-digits": (
        edited(("max_model_len: 4096", f"max_model_len: 0x{'f' * 5000}")),
        "4:18: model.max_model_len: should be at most 1000000000, not a huge number",
    ),
    "hexadecimal-for-text": (
        edited(("name: demo", f"name: 0x{'f' * 5000}")),
        "1:7: name: should be text, not a huge number; put it in quotes",
    ),
    "version-of-5000-digits": (
        edited(("device: cuda", f"device: cuda\n  vllm: '{NINES}.1'")),
        f"7:9: engine.vllm: '{'9' * 57}...' is not a version such as 0.29.0",
    ),
    "long-key": (
        edited(("name: demo", f"name: demo\n{'k' * 900}: 1")),
        f"2:1: unknown key '{'k' * 57}...'; known: name, model, engine, kv_transfer, fabric, "
        "prefill, decode, router, observability, benchmark, workload",
    ),
    "long-text": (
        edited(("name: demo", f"name: {'n' * 900}")),
        "1:7: name: should be lower-case letters, digits and '-' (at most 63, no '-' first or "
        f"last), not '{'n' * 57}...'",
    ),
}


@pytest.mark.parametrize(("content", "says"), FILES.values(), ids=FILES.keys())
def test_wrong_file(content: str | bytes, says: str) -> None:
    ended = pdctl("validate", write(content))
    assert (ended.code, ended.err) == (2, f"spec.yaml:{says}\n")


def test_missing_file() -> None:
    ended = pdctl("validate", "none.yaml")
    assert (ended.code, ended.err) == (
        2,
        "none.yaml:1:1: cannot be read: No such file or directory\n",
    )


def test_folder_instead_of_a_file() -> None:
    Path("folder").mkdir()
    ended = pdctl("validate", "folder")
    assert (ended.code, ended.err) == (2, "folder:1:1: cannot be read: Is a directory\n")


def test_a_file_name_cannot_write_to_the_terminal() -> None:
    ended = pdctl("validate", "\x1b[31m\nx.yaml")
    assert ended.err == "\\x1b[31m\\nx.yaml:1:1: cannot be read: No such file or directory\n"


def test_a_value_cannot_write_to_the_terminal() -> None:
    ended = pdctl("validate", write('"a\\e]0;title\\a\\u202e\\n": 1\n' + BASE))
    assert len(ended.lines) == 1
    assert ended.lines[0].isprintable()


@pytest.mark.parametrize("ending", ["\r\n", "\r", "\n"], ids=["crlf", "cr", "lf"])
def test_line_endings_and_byte_order_mark_are_no_fault(ending: str) -> None:
    ended = pdctl("validate", write(("\ufeff" + BASE).replace("\n", ending).encode()))
    assert (ended.code, ended.err) == (0, "")


def test_several_files_each_with_its_own_faults() -> None:
    Path("good.yaml").write_text(BASE)
    Path("bad.yaml").write_text(BASE.replace("demo", "Demo"))
    ended = pdctl("validate", "bad.yaml", "good.yaml", "none.yaml")
    assert ended.code == 2
    assert ended.out == "good.yaml: ok\n"
    assert [line.split(": ")[0] for line in ended.lines] == ["bad.yaml:1:7", "none.yaml:1:1"]


def test_faults_as_json() -> None:
    spec = write(edited(("port: 8100", "port: 0"), ("decode_ttl: 480s", "decode_ttl: 5s")))
    ended = pdctl("validate", "--json", spec)
    answer = json.loads(ended.out)
    assert (ended.code, answer["valid"], ended.err) == (2, False, "")
    assert [(f["line"], f["column"], f["level"]) for f in answer["faults"]] == [
        (9, 15, "warning"),
        (16, 13, "error"),
        (25, 15, "error"),
    ]
    assert json.loads(pdctl("validate", "--json", write(BASE)).out) == {"valid": True, "faults": []}


def test_a_warning_alone_is_no_failure() -> None:
    spec = write(edited(("  provider: efa", "  interfaces: 16")))
    ended = pdctl("validate", spec)
    assert (ended.code, ended.out) == (0, "spec.yaml: ok\n")
    assert ended.lines == [
        "spec.yaml:10:1: warning: fabric.provider is not set: where the fast fabric is missing, "
        "LIBFABRIC uses tcp without a word; say efa (or tcp, if that is meant)"
    ]


def test_render_says_the_same_and_writes_nothing() -> None:
    spec = write(edited(("port: 8100", "port: 0"), ("name: demo", "name: Demo")))
    ended = pdctl("render", spec, "-o", "out")
    assert (ended.code, ended.lines) == (2, pdctl("validate", spec).lines)
    assert len(ended.lines) == 2
    assert not Path("out").exists()


def test_rules_hold_for_what_the_command_line_asks_for() -> None:
    push = "decode_ttl: 480s\n  mode: push\n  connector: stock\n  bidirectional: false"
    spec = write(edited(("decode_ttl: 480s", push)))
    assert pdctl("render", spec, "-o", "out").code == 0
    ended = pdctl("render", spec, "-o", "other", "--bidir", "on")
    assert (ended.code, ended.lines) == (
        2,
        [
            "spec.yaml:10:9: kv_transfer.mode: push has no bidirectional transfer; say pull, or "
            "bidirectional: false"
        ],
    )


def test_the_console_script_ends_with_2_and_no_traceback() -> None:
    Path("a.yaml").write_text(BASE.replace("8100", "eight"))
    Path("b.yaml").write_bytes(b"\xff")
    ended = subprocess.run(
        [PDCTL, "validate", "a.yaml", "b.yaml", "/dev/stdin"],
        input="- a list",
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "a.yaml:16:13: prefill.legs[0].port: should be a whole number, not 'eight'",
        "b.yaml:1:1: is not UTF-8 text; save it as UTF-8",
        "/dev/stdin:1:1: must be a mapping of keys to values (name: ...), not a list",
    ]
