"""Nothing but the cost of streams depends on the native part."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from raw_engine import spliced
from router_rig import Chat, StartRouter

ABSENT = "import sys; sys.modules['pd_router._splice'] = None"
NO_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))"
OPEN = """
import asyncio, logging
logging.basicConfig(level="INFO")
from pd_router import splicing
async def opened():
    %s
    return splicing.open_splices(True)
print(asyncio.run(opened()))
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(
    not (shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").exists()),
    reason="no C compiler, or Python has no headers",
)
def test_it_is_there_where_it_can_be_built() -> None:
    """A fault in it makes no installation fail; it would be missed nowhere but here."""
    assert importlib.util.find_spec("pd_router._splice") is not None


def test_its_absence_is_told_and_no_error() -> None:
    ended = run(f"{ABSENT}\n{OPEN % 'pass'}")
    assert (ended.returncode, ended.stdout) == (0, "None\n"), ended.stderr
    assert "INFO:pd_router:without its native part (no compiler" in ended.stderr


def test_a_native_part_that_cannot_start_is_told_and_no_error() -> None:
    pytest.importorskip("pd_router._splice", reason="the native part was not built")
    # None is left: those that there are are below the limit.
    files = "import os\n    while True:\n        try: os.dup(0)\n        except OSError: break"
    ended = run(OPEN % f"{NO_FILES}\n    {files}")
    assert (ended.returncode, ended.stdout) == (0, "None\n"), ended.stderr
    assert "WARNING:pd_router:without its native part ([Errno 24]" in ended.stderr


def test_turns_are_answered_without_it(start_router: StartRouter) -> None:
    main = f"{ABSENT}; from pd_router.__main__ import main; sys.exit(main())"
    router = start_router(python=("-c", main))
    chat = Chat(router, "c")
    assert [chat.say("Hello").outcome, chat.say("Again").outcome] == ["miss", "hit"]
    assert spliced(router) == 0
    assert "without its native part" in router.log
