"""``python -m pd_router``: the router's command line and process."""

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvloop
from aiohttp import web

from pd_router.app import build_app
from pd_router.settings import Settings, SettingsError, load

DRAIN_SECONDS = 10.0
"""How long running turns may go on after SIGTERM."""


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
        return 0
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        uvloop.run(_serve(settings))
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        print(f"pd_router: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: Settings) -> None:
    runner = web.AppRunner(
        build_app(settings),
        access_log=None,
        handle_signals=False,
        # A client that leaves ends its turn, and with it the engines' work.
        handler_cancellation=True,
        shutdown_timeout=DRAIN_SECONDS,
    )
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
        logging.getLogger("pd_router").info(
            "%s listens on %s port %d", settings.name, settings.host, settings.port
        )
        _calm_collector()
        await stop.wait()
    finally:
        await runner.cleanup()


def _calm_collector() -> None:
    """Collect cycles rarely: a collection that walks all held handles stops every stream."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


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
