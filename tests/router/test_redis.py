"""Several routers that share their handles in a real redis-server."""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from router_rig import Chat, Router, StartRouter, launch, wait_for
from tests.ports import free_ports

from fake_engine import FakeEngine
from pd_router.handles import Handle
from pd_router.history import Past
from pd_router.packing import pack
from pd_router.store_redis import RedisStore

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="there is no redis-server here"
)


class Server:
    """A redis-server that can go away and come back."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)[0]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url)
        wait_for(lambda: answers(client), "redis-server answers")
        client.close()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def flush(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def keys(self) -> list[bytes]:
        with redis.Redis.from_url(self.url) as client:
            return sorted(client.keys())


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


Open = Callable[..., RedisStore]


@pytest.fixture
async def stores(server: Server) -> AsyncIterator[Open]:
    """Opens stores of routers of one deployment."""
    server.flush()
    opened: list[RedisStore] = []

    def open_store(**settings: Any) -> RedisStore:
        given = {"ttl": 60.0, "capacity": 100, "branches": 4, "legs": lambda: ["d0"]} | settings
        given.setdefault("on_drop", lambda handle, reason: None)
        given["answer_seconds"] = 30.0
        opened.append(RedisStore(server.url, "test", **given))
        return opened[-1]

    yield open_store
    for store in opened:
        await store.close()


def handle(
    name: str, key: str = "k", *, leg: str = "d0", engine: str = "e", **fields: Any
) -> Handle:
    past = Past("chat", 1, 1, b"d", b"a", b"c", False, 1, b"")
    now = time.time()
    given = {"born": now, "expires": now + 60} | fields
    return Handle(
        id=name,
        request=f"r-{name}",
        key=key,
        packed=pack({"remote_request_id": name}),
        leg=leg,
        engine=engine,
        past=past,
        tokens=10,
        ids_digest=b"",
        proven=True,
        partial=False,
        turn=1,
        **given,
    )


async def test_a_handle_is_claimed_once_however_many_ask(stores: Open) -> None:
    routers = [stores() for _ in range(4)]
    await routers[0].put(handle("one"))
    found = await asyncio.gather(*(router.find(["no", "k"]) for router in routers))
    assert [[h.id for h in handles] for handles in found] == [["one"]] * 4
    claims = [router.claim(found[0][0]) for router in routers * 8]
    assert sum(await asyncio.gather(*claims)) == 1
    assert await routers[0].find(["k"]) == []


async def test_a_claim_is_restored_or_used_up(stores: Open, server: Server) -> None:
    one, other = stores(), stores()
    first = handle("one")
    await one.put(first)
    assert await one.claim(first)
    await one.restore(first)
    assert [h.id for h in await other.find(["k"])] == ["one"]
    assert await other.claim(first)
    await other.commit(first)
    # Neither comes back, whoever says so.
    await other.restore(first)
    await one.restore(first)
    assert await one.find(["k"]) == []
    assert server.keys() == []


async def test_expired_handles_are_seen_and_not_claimed(stores: Open) -> None:
    store = stores()
    now = time.time()
    old = handle("old", born=now - 100, expires=now - 1)
    await store.put(old)
    assert [h.id for h in await store.find(["k"])] == ["old"]
    assert not await store.claim(old)


async def test_the_oldest_make_room(stores: Open) -> None:
    dropped: list[tuple[str, str]] = []
    store = stores(capacity=3, branches=2, on_drop=lambda h, reason: dropped.append((h.id, reason)))
    now = time.time()
    for number in range(3):
        await store.put(handle(f"a{number}", "a", born=now + number))
    assert dropped == [("a0", "replaced")]
    assert [h.id for h in await store.find(["a"])] == ["a2", "a1"]
    for number in range(2):
        await store.put(handle(f"b{number}", "b", born=now + 10 + number))
    assert dropped == [("a0", "replaced"), ("a1", "evicted")]
    assert [h.id for h in await store.newest(0, 2)] == ["b1", "b0"]
    await store.drop(await store.find(["b"]), "released")
    assert dropped[2:] == [("b1", "released"), ("b0", "released")]


async def test_a_lost_leg_takes_its_handles_with_it(stores: Open, server: Server) -> None:
    store = stores()
    gone, claimed = handle("gone", "a"), handle("claimed", "b")
    fresh, elsewhere = handle("fresh", "c", engine="new"), handle("elsewhere", "d", leg="d1")
    for one in (gone, claimed, fresh, elsewhere):
        await store.put(one)
    assert await store.claim(claimed)
    assert await store.drop_leg("d0", "leg_restarted", keep_engine="new") == 1
    await store.restore(claimed)
    kept = [[h.id for h in await store.find([key])] for key in "abcd"]
    assert kept == [[], [], ["fresh"], ["elsewhere"]]
    assert await store.drop_leg("d0", "leg_down") == 1
    await store.drop(await store.find(["d"]), "released")
    assert server.keys() == []


async def test_deployments_do_not_see_each_other(stores: Open, server: Server) -> None:
    await stores().put(handle("one"))
    other = RedisStore(
        server.url,
        "other",
        ttl=60,
        capacity=1,
        branches=1,
        legs=lambda: [],
        on_drop=lambda handle, reason: None,
        answer_seconds=30.0,
    )
    assert await other.find(["k"]) == []
    await other.close()


def share(
    server: Server, folder: Path, prefill: FakeEngine, decode: FakeEngine, count: int = 2
) -> list[Router]:
    return [
        launch(folder, [prefill], [decode], state=server.url, state_timeout=30.0)
        for _ in range(count)
    ]


@pytest.fixture
def routers(server: Server, tmp_path: Path) -> Iterator[list[Router]]:
    server.flush()
    prefill, decode = FakeEngine("prefill").start(), FakeEngine("decode").start()
    routers = share(server, tmp_path, prefill, decode)
    yield routers
    for router in routers:
        router.stop()
        assert "Traceback" not in router.log
    for engine in (prefill, decode):
        engine.stop()
        assert engine.violations == []


def test_a_conversation_goes_on_at_another_router(routers: list[Router]) -> None:
    chat = Chat(routers[0], "c")
    chat.say("Hello")
    outcomes = []
    for number in range(1, 5):
        chat.router = routers[number % 2]
        outcomes.append(chat.say(f"Turn {number}").outcome)
    assert outcomes == ["hit"] * 4
    seen = routers[0].get("/admin/conversations").json()["conversations"]
    assert [one["turn"] for one in seen] == [5]


def test_a_router_that_starts_again_finds_its_handles(
    routers: list[Router], tmp_path: Path
) -> None:
    chat = Chat(routers[0], "c")
    chat.say("Hello")
    routers[0].stop()
    assert routers[0].decode[0].released_turns == []
    engines = routers[0].prefill, routers[0].decode
    routers.append(launch(tmp_path, *engines, state=server_url(routers[0]), state_timeout=30.0))
    chat.router = routers[-1]
    assert chat.say("Again").outcome == "hit"


def server_url(router: Router) -> str:
    return str(json.loads(router.config_path.read_text())["state"])


def test_without_the_server_turns_go_on(routers: list[Router], server: Server) -> None:
    chat = Chat(routers[0], "c")
    chat.say("Hello")
    server.stop()
    try:
        answer = chat.say("Again")
        assert (answer.status, answer.outcome) == (200, "miss")
        assert "no reuse for now" in routers[0].log
    finally:
        server.start()
    wait_for(lambda: [chat.say("More").outcome, chat.say("More").outcome][-1] == "hit", "reuse")


def test_a_server_that_was_never_there_stops_nothing(start_router: StartRouter) -> None:
    router = start_router(state=f"redis://127.0.0.1:{free_ports(1)[0]}/0")
    chat = Chat(router, "c")
    assert [chat.say("Hello").status, chat.say("Again").status] == [200, 200]
