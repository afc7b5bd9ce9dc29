"""What a start script warns about before it starts an engine."""

import subprocess
import sys
from pathlib import Path

from pd_connector.check import installed, interfaces, warnings

WANTED = {"vllm": "0.29.0", "nixl": "1.4.1"}


def test_a_node_as_the_spec_says_gives_no_warning() -> None:
    found = {"vllm": "0.29.0+cu130", "nixl": "1.4.1"}
    assert list(warnings(WANTED, 16, found.get, lambda: 16)) == []


def test_other_versions_and_missing_interfaces_are_told() -> None:
    found = {"vllm": "0.28.0"}
    assert list(warnings(WANTED, 16, found.get, lambda: 0)) == [
        "vllm 0.28.0 is installed, the spec says 0.29.0: flags may not fit",
        "nixl is not installed beside pd_connector",
        "0 of 16 fabric interfaces in /sys/class/infiniband: transfers would be slow",
    ]


def test_interfaces_are_counted_where_the_kernel_lists_them(tmp_path: Path) -> None:
    assert interfaces(tmp_path / "none") == 0
    (tmp_path / "rdmap0s6").mkdir()
    assert interfaces(tmp_path) == 1


def test_the_start_scripts_call_warns_and_goes_on() -> None:
    call = "from pd_connector.check import main; main()"
    words = [sys.executable, "-c", call, "prefill-0", "0.1.0", "1.4.1", "0"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    said = f"WARNING prefill-0: vllm {installed('vllm')} is installed, the spec says 0.1.0"
    assert said in done.stderr
