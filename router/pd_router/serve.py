"""The server process: sockets, signals, drain and reload."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import ssl
from pathlib import Path

from aiohttp import web

from pd_router.access import Access
from pd_router.app import ACCESS, DRAIN, ROUTER, build_app
from pd_router.connection import Server
from pd_router.reload import reload
from pd_router.settings import Settings, SettingsError

log = logging.getLogger("pd_router")

_BACKLOG = 1024
_LAST_SECONDS = 1.0
"""For connections to close after the drain."""


async def serve(settings: Settings, config: Path) -> None:
    """Serve until SIGTERM or SIGINT, and then until the drain is over.

    SIGHUP reads ``config`` again. Raises :class:`OSError` if it cannot listen and
    :class:`SettingsError` for a file of the settings that cannot be used.
    """
    access, tls = Access(settings), tls_of(settings)
    app = build_app(settings, access)
    _raise_file_limit()
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        logger=_QuietLogger(),
        # A client that leaves ends its turn, and with it the engines' work.
        handler_cancellation=True,
        shutdown_timeout=_LAST_SECONDS,
        keepalive_timeout=settings.keep_alive_timeout,
        max_line_size=settings.max_header_bytes,
        max_field_size=settings.max_header_bytes,
        max_headers=settings.max_headers,
        # What is compressed is for read_body, which can answer as the path's clients read it.
        auto_decompress=False,
        lingering_time=_LAST_SECONDS,
    )
    await runner.setup()
    assert runner.server is not None
    Server.take_over(runner.server, lambda: app[ROUTER].settings.client_stall_timeout)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, app, config)
    try:
        site = web.TCPSite(runner, settings.host, settings.port, ssl_context=tls, backlog=_BACKLOG)
        await site.start()
        log.info("%s listens on %s port %d", settings.name, settings.host, settings.port)
        _calm_collector()
        await stop.wait()
        await _drain(app, site, stop)
    finally:
        await runner.cleanup()


async def _drain(app: web.Application, site: web.TCPSite, stop: asyncio.Event) -> None:
    """Take no more requests and let those that run end; a second signal ends the wait."""
    drain, within = app[DRAIN], app[ROUTER].settings.drain_timeout
    stop.clear()
    drain.begin()
    log.info("draining for at most %g s", within)
    await site.stop()
    wait = asyncio.create_task(drain.finish(within))
    again = asyncio.create_task(stop.wait())
    await asyncio.wait({wait, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not wait.done():
        wait.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await wait
        log.warning("told to stop at once")
        cut = await drain.finish(0.001)
    else:
        cut = wait.result()
    if cut:
        log.warning("%d requests were cut off", cut)


def _reload(app: web.Application, config: Path) -> None:
    app[ROUTER].background(reload(app[ROUTER], app[ACCESS], config))


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """The TLS context. Raises :class:`SettingsError` for files that cannot be used."""
    if settings.tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(
            Path(settings.tls.certificate).expanduser(), Path(settings.tls.key).expanduser()
        )
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        files = f"{settings.tls.certificate}, {settings.tls.key}"
        raise SettingsError(f"tls: {files}: {reason}") from None
    return context


class _QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """One line, without a stack, for what a client did wrong."""

    def __init__(self) -> None:
        super().__init__(log, {})

    def exception(self, msg: object, *args: object, **named: object) -> None:
        error = named.get("exc_info")
        log.debug("a request that is not HTTP: %s", type(error).__name__)


def _raise_file_limit() -> None:
    """A stream needs two sockets; the usual limit of 1024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _calm_collector() -> None:
    """Collect cycles less often than usual: turns leave none, however they end, and each
    collection is a pause for all streams. Held handles are not walked: with 100,000 of them a
    whole collection takes 2 to 6 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
