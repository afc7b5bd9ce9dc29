"""Headless Chromium: a screenshot of a page, and what it asked the network for."""

import json
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from tests.programs import program

CHROMIUMS_OWN = {"accounts.google.com"}
NOBODY = "not an origin"
"""The initiator of what Chromium asks for by itself."""
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --virtual-time-budget=2000"
).split()


def screenshot(page: Path, picture: Path, width: int, height: int, *flags: str) -> set[str]:
    """Draw a page into a PNG.

    Returns:
        The http and https URLs that the page asked for.
    """
    log = picture.with_suffix(".netlog.json")
    subprocess.run(
        [
            program("chromium"),
            *QUIET,
            f"--user-data-dir={picture.with_suffix('.profile')}",
            f"--window-size={width},{height}",
            f"--log-net-log={log}",
            f"--screenshot={picture}",
            *flags,
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    events = json.loads(log.read_text())["events"]
    asked = {
        str(event["params"]["url"])
        for event in events
        if event.get("params", {}).get("initiator", NOBODY) != NOBODY and "url" in event["params"]
    }
    return {
        url
        for url in asked
        if url.startswith(("http://", "https://")) and urlsplit(url).hostname not in CHROMIUMS_OWN
    }
