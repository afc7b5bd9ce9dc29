"""The router's choices on the real engine: whatever it does, answers are a plain request's."""

import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome, Route
from pdctl.counters import router_counter
from tests.ports import free_ports
from tests.programs import program
from tests.waiting import until

from .conftest import Deployment
from .routers import TOKENS, Chat, Start, leases, outcome, pins, read


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def test_short_turns_are_appended_and_can_be_read_back(
    deployment: Deployment, start: Start
) -> None:
    chat = Chat(deployment, start(route="auto").url, conversation_id=uuid.uuid4().hex)
    assert chat.say(1500).headers[contract.HEADER_ROUTE] == Route.RECOMPUTE.value
    for _ in range(2):
        answer = chat.say(60)
        assert answer.headers[contract.HEADER_ROUTE] == Route.APPEND.value
        assert outcome(answer) == Outcome.LOCAL_HIT.value
    pinned = chat.say(60, x_pd_route="readback")
    assert (outcome(pinned), read(pinned) > 1500) == (Outcome.HIT.value, True)


def test_token_ids_prove_a_history(deployment: Deployment, start: Start) -> None:
    chat = Chat(deployment, start(reuse_proof="tokens").url, conversation_id=uuid.uuid4().hex)
    assert outcome(chat.say()) == Outcome.MISS.value
    for _ in range(2):
        answer = chat.say(100)
        assert (outcome(answer), read(answer) > 400) == (Outcome.HIT.value, True)
    chat.messages[0]["content"] = "Z" + chat.messages[0]["content"][1:]
    assert outcome(chat.say(100)) == Outcome.HISTORY_CHANGED.value


def test_a_truncated_history_is_read_as_far_as_it_agrees(deployment: Deployment) -> None:
    chat = Chat(deployment, deployment.router_url, conversation_id=uuid.uuid4().hex)
    chat.say(600)
    held = int(chat.say(300).headers[contract.HEADER_PROMPT_TOKENS]) + TOKENS - 1
    chat.messages = chat.messages[:2]
    answer = chat.say(300)
    assert outcome(answer) == Outcome.HIT.value
    assert 600 < read(answer) < held


def test_branches_retries_and_requests_beside_a_conversation(deployment: Deployment) -> None:
    chat = Chat(deployment, deployment.router_url, conversation_id=uuid.uuid4().hex)
    chat.say(600)
    aside = chat.copy()
    aside.messages = []
    assert outcome(aside.say(50)) != Outcome.HIT.value
    branches = [chat.copy() for _ in range(3)]
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda b=b: answers.append(b.say(50))) for b in branches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # At most one had the first turn's handle; a late one may have read a finished sibling's.
    assert len(answers) == 3
    assert Outcome.HIT.value in map(outcome, answers)
    assert [outcome(branch.say(50)) for branch in branches] == [Outcome.HIT.value] * 3


def test_conversations_side_by_side(deployment: Deployment) -> None:
    chats = [
        Chat(deployment, deployment.router_url, conversation_id=uuid.uuid4().hex) for _ in range(6)
    ]
    seen: dict[Chat, list[str]] = {chat: [] for chat in chats}

    def talk(chat: Chat) -> None:
        seen[chat] += [outcome(chat.say(300)), outcome(chat.say(100))]

    threads = [threading.Thread(target=talk, args=(chat,)) for chat in chats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(seen.values()) == [[Outcome.MISS.value, Outcome.HIT.value]] * 6


def test_a_history_without_an_id_and_two_tenants_with_one(
    deployment: Deployment, start: Start
) -> None:
    chat = Chat(deployment, deployment.router_url)
    chat.say()
    assert outcome(chat.say(50)) == Outcome.HIT.value
    one = Chat(deployment, start(tenant_header="X-Tenant").url, conversation_id="shared")
    one.headers["X-Tenant"] = "one"
    one.say()
    two = one.copy()
    two.headers["X-Tenant"] = "two"
    assert outcome(two.say(50)) == Outcome.MISS.value
    assert outcome(one.say(50)) == Outcome.HIT.value


def test_a_router_that_restarts_starts_without_handles(
    deployment: Deployment, start: Start
) -> None:
    conversation = uuid.uuid4().hex
    chat = Chat(deployment, start().url, conversation_id=conversation)
    chat.say()
    chat.url = start().url
    assert outcome(chat.say(50)) == Outcome.MISS.value
    assert outcome(chat.say(50)) == Outcome.HIT.value


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    port = free_ports(1)[0]
    command = [program("redis-server"), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--save", "", "--appendonly", "no", "--dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield f"redis://127.0.0.1:{port}/0"
    server.kill()
    server.wait()


def test_routers_share_a_conversation_and_its_handle_survives_them(
    deployment: Deployment, start: Start, redis_url: str
) -> None:
    chat = Chat(deployment, "", conversation_id=uuid.uuid4().hex)
    seen = []
    one, two = start(state=redis_url), start(state=redis_url)
    for router in (one, two, one):
        chat.url = router.url
        seen.append(outcome(chat.say(200)))
    for router in (one, two):
        router.process.terminate()
        assert router.process.wait(30) == 0
    chat.url = start(state=redis_url).url
    seen.append(outcome(chat.say(200)))
    assert seen == [Outcome.MISS.value, *[Outcome.HIT.value] * 3]


def test_what_nobody_will_read_is_released(deployment: Deployment, start: Start) -> None:
    url = start(max_branches=1).url
    before = pins(deployment)
    for _ in range(3):
        Chat(deployment, url, conversation_id="replaced").say(200)
    dropped = telemetry.ROUTER_HANDLES_DROPPED.name
    assert router_counter(deployment.client, url, dropped) == 2
    until("decode has let go of two", lambda: len(pins(deployment) - before) <= 1)


def test_a_conversation_that_pauses_keeps_its_blocks(deployment: Deployment, start: Start) -> None:
    """A router whose handles live for 1 s renews decode's lease of 300 s until it is used."""
    chat = Chat(deployment, start(handle_ttl=1, handle_max_age=600).url, conversation_id="pause")
    known = {turn["id"] for turn in leases(deployment)["turns"]}
    chat.say(200)

    def renewed() -> bool:
        mine = [turn for turn in leases(deployment)["turns"] if turn["id"] not in known]
        return any(turn["age"] > 4 and turn["seconds_left"] > 297 for turn in mine)

    until("decode keeps it for as long as at first", renewed)
    assert outcome(chat.say(50)) == Outcome.HIT.value
