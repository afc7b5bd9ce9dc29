"""The same spec gives the same bytes, wherever and however it is rendered."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli import pdctl
from tests.render.scripts import EXAMPLES, SPEC, render

PDCTL = Path(sys.executable).with_name("pdctl")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_twice_the_same(path: Path, tmp_path: Path) -> None:
    assert render(path, tmp_path / "a") == render(path, tmp_path / "b")


def test_surroundings_do_not_matter(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    text = {**SPEC, "engine": {"venv": "venv", "env": {"A": "ü 模型", "B": "b"}}}
    spec.write_text(yaml.safe_dump(text, allow_unicode=True), encoding="utf-8")
    expected = render(spec, tmp_path)
    surroundings: list[tuple[str, Path, int, dict[str, str]]] = [
        ("one", Path("/"), 0o077, {"LC_ALL": "C", "PYTHONHASHSEED": "1"}),
        (
            "two",
            tmp_path,
            0o000,
            {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "Asia/Tokyo"},
        ),
    ]
    for name, cwd, umask, env in surroundings:
        out = tmp_path / name
        ended = subprocess.run(
            [PDCTL, "render", os.path.relpath(spec, cwd), "-o", out],
            cwd=cwd,
            umask=umask,
            env={"PATH": os.environ["PATH"], **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert {file.name: file.read_bytes().decode() for file in out.iterdir()} == expected
        modes = {file.suffix: stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()}
        assert modes == {".sh": 0o755, ".json": 0o644}


def test_the_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    for path in EXAMPLES:
        straight = yaml.safe_load(path.read_text())
        (tmp_path / "a").mkdir(exist_ok=True)
        assert render(straight, tmp_path / "a") == render(backwards(straight), tmp_path / "a")


def backwards(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: backwards(data[key]) for key in reversed(data)}
    return [backwards(item) for item in data] if isinstance(data, list) else data


def test_render_replaces_what_it_rendered_before(tmp_path: Path) -> None:
    before = render(SPEC, tmp_path, "--bidir", "off")
    assert render(SPEC, tmp_path, "--bidir", "on") != before
    assert render(SPEC, tmp_path, "--bidir", "off") == before


def test_a_folder_that_cannot_be_written_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    (tmp_path / "out" / "prefill-0.sh").mkdir(parents=True)
    ended = pdctl("render", tmp_path / "spec.yaml", "-o", tmp_path / "out")
    assert ended.code == 2
    assert ended.err == f"{tmp_path}/out/prefill-0.sh: Is a directory\n"
    ended = pdctl("render", tmp_path / "spec.yaml", "-o", tmp_path / "file" / "out")
    assert ended.code == 2
    assert "Not a directory" in ended.err


def test_64_legs(tmp_path: Path) -> None:
    text = {
        **SPEC,
        "prefill": {"legs": [{"host": f"p{n}", "port": 8100} for n in range(32)]},
        "decode": {"legs": [{"host": f"d{n}", "port": 8200} for n in range(32)]},
    }
    files = render(text, tmp_path)
    assert len(files) == 67
    assert len(json.loads(files["router.json"])["prefill"]) == 32
