"""Headless Chromium: a screenshot of a page, and what it asked the network for."""

import json
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from tests.programs import program

CHROMIUMS_OWN = {"accounts.google.com", "clients2.google.com", "update.googleapis.com"}
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --virtual-time-budget=2000"
).split()


def screenshot(page: Path, picture: Path, width: int, height: int, *flags: str) -> set[str]:
    """Draw a page into a PNG.

    Returns:
        The http and https URLs that were asked for, without Chromium's own look for updates.
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
    urls = {str(event.get("params", {}).get("url", "")) for event in events}
    asked = {url for url in urls if url.startswith(("http://", "https://"))}
    return {url for url in asked if urlsplit(url).hostname not in CHROMIUMS_OWN}
