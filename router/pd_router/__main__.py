"""``python -m pd_router``: the router's command line and process."""

import argparse
import asyncio
import logging
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn
from urllib.parse import urlsplit

import uvloop
from aiohttp import web

from pd_router.app import build_app
from pd_router.settings import Settings

DRAIN_SECONDS = 10.0
"""How long running turns may go on after SIGTERM."""


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Exit status 0 after a drain, 1 if it cannot listen,
    2 on a bad command line."""
    settings = parse(sys.argv[1:] if argv is None else argv)
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
        await stop.wait()
    finally:
        await runner.cleanup()


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"pd_router: {message}\n")


def parse(argv: Sequence[str]) -> Settings:
    """Settings of a command line; a bad one ends the process with one line and status 2."""
    parser = _parser()
    given = parser.parse_args(argv)
    legs = [*given.prefill, *given.decode]
    names = [name for name, _ in legs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"leg name used twice: {', '.join(twice)}")
    if given.handle_ttl >= given.decode_ttl:
        parser.error(
            f"--handle-ttl {given.handle_ttl:g} must be below --decode-ttl {given.decode_ttl:g}"
        )
    return Settings(
        name=given.name,
        host=given.host,
        port=given.port,
        prefill=dict(given.prefill),
        decode=dict(given.decode),
        handle_ttl=given.handle_ttl,
        decode_ttl=given.decode_ttl,
        connector=given.connector,
        bidirectional=given.bidirectional == "on",
        conversation_headers=tuple(given.conversation_header),
        prefill_timeout=given.prefill_timeout,
        readback_timeout=given.readback_timeout,
        stream_idle_timeout=given.stream_idle_timeout,
        answer_timeout=given.answer_timeout,
        max_handles=given.max_handles,
        max_body=given.max_body_bytes,
        log_level=given.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="pd_router", allow_abbrev=False, description="KV-aware router of vLLM P/D legs."
    )
    add = parser.add_argument
    add("--name", required=True, help="name of this leg, as logged")
    add("--host", required=True, help="address to listen on")
    add("--port", required=True, type=_port)
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            required=True,
            action="append",
            type=_leg,
            metavar="NAME=URL",
            help=f"a {role} leg; repeatable",
        )
    add("--handle-ttl", required=True, type=_seconds, metavar="SECONDS", help="use of a handle")
    add(
        "--decode-ttl",
        required=True,
        type=_seconds,
        metavar="SECONDS",
        help="decode's decoder_kv_blocks_ttl",
    )
    add("--connector", required=True, choices=("pdctl", "stock"))
    add("--bidirectional", required=True, choices=("on", "off"))
    add(
        "--conversation-header",
        action="extend",
        nargs="+",
        default=[],
        type=_header_name,
        metavar="NAME",
        help="more request headers that name a conversation",
    )
    _add_bounds(add)
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _add_bounds(add: Callable[..., object]) -> None:
    for flag, default, text in (
        ("--prefill-timeout", 600, "a prefill without a handle"),
        ("--readback-timeout", 60, "a prefill with a handle"),
        ("--stream-idle-timeout", 300, "decode's silence within a stream"),
        ("--answer-timeout", 1800, "decode's answer when it is not streamed"),
    ):
        add(
            flag,
            type=_seconds,
            default=float(default),
            metavar="SECONDS",
            help=f"bound of {text} (default {default})",
        )
    add("--max-handles", type=_count, default=100_000, metavar="N", help="handles held at once")
    add("--max-body-bytes", type=_count, default=64 << 20, metavar="N", help="largest request")


def _leg(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise argparse.ArgumentTypeError(f"{url!r} is not an http URL of a host and port")
    return name, url.rstrip("/")


def _header_name(text: str) -> str:
    if not _HEADER_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a header name")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
