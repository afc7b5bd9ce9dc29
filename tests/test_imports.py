"""What the command line loads: a help text must not wait for an engine's libraries."""

import subprocess
import sys

import pytest

HEAVY = ("aiohttp", "httpx", "jinja2", "pydantic", "rich", "torch", "vllm", "yaml")
SCRIPT = """
import sys
from pdctl.cli import main
sys.argv = ["pdctl", *sys.argv[1:]]
try:
    main()
finally:
    loaded = {name.partition(".")[0] for name in sys.modules}
    print("LOADED", *sorted(loaded), file=sys.stderr)
"""


def loaded(*args: str) -> set[str]:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *args], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return set(ended.stderr.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("args", [["--help"], ["--version"]], ids=" ".join)
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    assert loaded(*args).isdisjoint(HEAVY)


@pytest.mark.parametrize("command", ["validate", "schema", "render"])
def test_pure_commands_load_no_engine_and_no_network(command: str) -> None:
    assert loaded(command, "--help").isdisjoint(("aiohttp", "httpx", "torch", "vllm"))
