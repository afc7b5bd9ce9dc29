"""What all turns share, put together and taken apart."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pd_connector import telemetry
from pd_router.engines import Engines
from pd_router.handles import Handle, HandleStore, MemoryStore, OnDrop
from pd_router.health import Health
from pd_router.leases import LeaseOrders
from pd_router.legs import Leg, Legs
from pd_router.lifetime import Deadlines
from pd_router.metrics import Metrics
from pd_router.pairs import Pairs, RepeatBudget
from pd_router.reasons import PREFILL_FAULTS, REFUSALS, ROUTE_REASONS
from pd_router.releases import Releases
from pd_router.renewals import Renewals
from pd_router.routes import Chooser
from pd_router.settings import Settings
from pd_router.spans import Spans, otlp_export
from pd_router.splicing import Splices, open_splices
from pd_router.tokens import PromptIds

log = logging.getLogger("pd_router")

VERSION = "0.1.0"


@dataclass(slots=True)
class Router:
    """One router. ``settings`` may be replaced while it runs; a turn keeps those it began with."""

    settings: Settings
    legs: Legs
    engines: Engines
    handles: HandleStore
    pairs: Pairs
    health: Health
    releases: Releases
    renewals: Renewals
    chooser: Chooser
    prompt_ids: PromptIds
    metrics: Metrics
    spans: Spans | None
    splices: Splices | None
    budget: RepeatBudget = field(default_factory=RepeatBudget)
    deadlines: Deadlines = field(default_factory=Deadlines)
    tasks: set["asyncio.Future[Any]"] = field(default_factory=set)

    def background(self, work: Awaitable[object]) -> None:
        """Do something that no turn waits for; a turn that is cut off does not cut it off."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Future[Any]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected error in the background", exc_info=error)


@asynccontextmanager
async def open_router(settings: Settings) -> AsyncIterator[Router]:
    """The parts of one router, until its end."""
    engines, metrics = Engines(), Metrics()
    legs = Legs(settings.prefill, settings.decode)
    orders = LeaseOrders(engines)
    releases = Releases(orders, legs.known)
    pairs = Pairs(settings.pair_pause)

    def dropped(handle: Handle, reason: str) -> None:
        metrics.handles_dropped.labels(reason).inc()
        if reason in ("evicted", "replaced", "released"):
            releases.add(handle)

    handles = _store(settings, legs, dropped)

    def background(work: Awaitable[object]) -> None:
        router.background(work)

    def restarted(leg: Leg) -> None:
        metrics.leg_restarts.labels(leg.name).inc()

    health = Health(legs, engines, handles, pairs, background=background, on_restart=restarted)
    router = Router(
        settings=settings,
        legs=legs,
        engines=engines,
        handles=handles,
        pairs=pairs,
        health=health,
        releases=releases,
        renewals=Renewals(orders, legs.named, lambda: router.settings),
        chooser=Chooser(settings),
        prompt_ids=PromptIds(engines),
        metrics=metrics,
        spans=_spans(settings, metrics),
        splices=open_splices(settings.native),
    )
    _gauges(router)
    start_counting(router)
    workers = [
        asyncio.create_task(work)
        for work in (health.watch(), releases.work(), router.renewals.work(), handles.watch())
    ]
    try:
        yield router
    finally:
        for task in [*workers, *router.tasks]:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*workers)
        await _give_back(router)
        if router.spans is not None:
            await asyncio.to_thread(router.spans.close)
        if router.splices is not None:
            router.splices.close()
        await handles.close()
        await engines.close()


async def _give_back(router: Router) -> None:
    """Have decode free what it keeps for handles that end with this process."""
    settings, now = router.settings, time.time()
    margin = settings.decode_ttl - settings.handle_ttl
    kept = (handle for handle in router.handles.last_here() if handle.expires + margin > now)
    freed, left = await router.releases.finish(kept)
    if freed or left:
        log.info("kept turns on decode: %d released, %d could not be", freed, left)


def _store(settings: Settings, legs: Legs, on_drop: OnDrop) -> HandleStore:
    if settings.state != "memory":
        # An extra: only who shares handles needs its client library.
        from pd_router.store_redis import RedisStore  # noqa: PLC0415

        return RedisStore(
            settings.state,
            settings.deployment,
            ttl=settings.handle_ttl,
            capacity=settings.max_handles,
            branches=settings.max_branches,
            legs=lambda: [leg.name for leg in legs.decode],
            on_drop=on_drop,
            answer_seconds=settings.state_timeout,
        )
    return MemoryStore(
        ttl=settings.handle_ttl,
        capacity=settings.max_handles,
        max_bytes=settings.max_handle_bytes,
        branches=settings.max_branches,
        on_drop=on_drop,
    )


def _spans(settings: Settings, metrics: Metrics) -> Spans | None:
    if settings.otlp_endpoint is None:
        return None
    try:
        export = otlp_export(settings.otlp_endpoint, settings.otlp_protocol, settings.name)
    except ImportError as error:
        log.warning("no spans: %s (pip install 'pdctl[observability]')", error)
        return None
    return Spans(export, metrics.spans_dropped.inc)


def start_counting(router: Router) -> None:
    """Every counter is there from the start, so that its first increase is seen as one."""
    metrics, legs = router.metrics, router.legs
    for leg in legs.prefill:
        metrics.handles_sent.labels(leg.name)
        for fault in PREFILL_FAULTS:
            metrics.prefill_retries.labels(leg.name, fault)
    for route, reasons in ROUTE_REASONS.items():
        for reason in reasons:
            metrics.routes.labels(route.value, reason)
    for refusal in REFUSALS:
        metrics.handles_refused.labels(refusal)
    for leg in legs:
        metrics.leg_restarts.labels(leg.name)


def _gauges(router: Router) -> None:
    """What the metrics tell of the moment in which they are read."""
    add, legs, handles = router.metrics.gauge, router.legs, router.handles

    def held() -> list[tuple[tuple[str, ...], float]]:
        count = handles.held()
        return [((leg.name,), count.get(leg.name, 0)) for leg in legs.decode]

    add(telemetry.ROUTER_HANDLES_HELD, held)
    add(telemetry.ROUTER_HANDLES_BYTES, lambda: [((), handles.bytes_held())])
    add(
        telemetry.ROUTER_HANDLES_BYTES_LIMIT,
        lambda: [((), router.settings.max_handle_bytes)],
    )
    add(telemetry.ROUTER_HANDLES_LIMIT, lambda: [((), router.settings.max_handles)])
    add(telemetry.ROUTER_HANDLE_TTL, lambda: [((), router.settings.handle_ttl)])
    add(
        telemetry.ROUTER_LEG_UP,
        lambda: [((leg.name, leg.role), float(leg.down is None)) for leg in legs],
    )
    add(
        telemetry.ROUTER_LEG_REQUESTS,
        lambda: [((leg.name, leg.role), leg.in_flight) for leg in legs],
    )
    add(telemetry.ROUTER_LEG_TOKENS, lambda: [((leg.name, leg.role), leg.tokens) for leg in legs])
    add(
        telemetry.ROUTER_PAIR_UP,
        lambda: [
            ((prefill.name, decode.name), float(router.pairs.works(prefill.name, decode.name)))
            for prefill in legs.prefill
            for decode in legs.decode
        ],
    )

    def info() -> list[tuple[tuple[str, ...], float]]:
        settings = router.settings
        on = "on" if settings.bidirectional else "off"
        return [((VERSION, settings.connector, on, settings.proof, settings.route), 1)]

    add(telemetry.ROUTER_INFO, info)
