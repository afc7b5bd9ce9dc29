"""``python -m pd_router``: the router's command line and process."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvloop

from pd_router.access import Access
from pd_router.serve import serve, tls_of
from pd_router.settings import Settings, SettingsError, load


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Exit status 0 after a drain, 1 if it cannot listen,
    2 on a bad command line or config file."""
    given = _parser().parse_args(argv)
    try:
        settings = load(given.config)
    except SettingsError as error:
        print(f"pd_router: {error}", file=sys.stderr)
        return 2
    if given.check:
        return _check(settings)
    # A turn's line needs none of these.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        uvloop.run(serve(settings, given.config))
    except SettingsError as error:
        print(f"pd_router: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        print(f"pd_router: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _check(settings: Settings) -> int:
    """Also the files that the settings name."""
    try:
        Access(settings)
        tls_of(settings)
    except SettingsError as error:
        print(f"pd_router: {error}", file=sys.stderr)
        return 2
    return 0


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"pd_router: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="pd_router", allow_abbrev=False, description="KV-aware router of vLLM P/D legs."
    )
    parser.add_argument(
        "--config",
        required=True,
        type=Path,
        metavar="FILE",
        help="JSON config file, as 'pdctl render' writes it (router.json)",
    )
    parser.add_argument("--check", action="store_true", help="check the config file and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
