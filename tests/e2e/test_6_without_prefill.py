"""Prefill dies amid a read; then it comes back with bidirectional transfer off."""

import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator

import httpx
import pytest

from pd_connector import contract
from pd_connector.contract import Outcome
from pdctl.conversation import user_text
from tests.waiting import until

from .pair import TOKENS, Pair, pinned
from .routers import listens
from .test_6_connector import check, hit

pytestmark = pytest.mark.e2e_connector


@pytest.fixture(scope="module")
def without_readback(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A prefill leg of the same spec with bidirectional off, in the place of the dead one."""
    folder = tmp_path_factory.mktemp("off")
    pair.deployment.pdctl("render", "SPEC", "--bidir", "off", "-o", str(folder))
    secret = pair.deployment.folder / "state" / pair.deployment.name / "secret"
    with (folder / "prefill.log").open("wb") as log:
        leg = subprocess.Popen(
            ["bash", str(folder / "prefill-0.sh")],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {contract.SECRET_FILE_VARIABLE: str(secret)},
        )
    until("prefill is up", lambda: is_up(pair), 300)
    yield
    os.killpg(leg.pid, signal.SIGTERM)
    leg.wait(60)


def is_up(pair: Pair) -> bool:
    try:
        return pair.client.get(f"{pair.deployment.prefill_url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_a_reader_that_dies_leaves_decode_whole(pair: Pair) -> None:
    pair.leases(release=sorted(pinned(pair)))
    turns = [hit(pair) for _ in range(3)]
    ids = {handle[contract.REMOTE_REQUEST_ID] for _, handle in turns}

    def read(prompt: str, handle: dict[str, object]) -> None:
        with pytest.raises(httpx.HTTPError):
            # Far more tokens than there is time for.
            pair.post(pair.deployment.prefill_url, handle, prompt, 4000, ignore_eos=True)

    answers: list[httpx.Response] = []

    def ask_router() -> None:
        body = {"model": "canary", "prompt": user_text(secrets.token_hex(4), 7000), "max_tokens": 1}
        answers.append(pair.client.post(f"{pair.deployment.router_url}/v1/completions", json=body))

    readers = [threading.Thread(target=read, args=turn) for turn in turns]
    readers.append(threading.Thread(target=ask_router))
    leader = pair.deployment.status()["prefill-0"]["pid"]
    for reader in readers:
        reader.start()
    until("a turn is read", lambda: any(t["reading"] for t in pair.leases()["turns"]))
    os.killpg(leader, signal.SIGKILL)
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()
    (refused,) = answers
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert "prefill-0" in refused.json()["error"]["message"]
    assert "127.0.0.1" not in refused.text
    # Released meanwhile: at once, or once the dead reader's claim lapses.
    answer = pair.leases(release=sorted(ids))
    assert {*answer["released"], *answer["reading"], *answer["unknown"]} == ids
    url = pair.deployment.decode_url
    pair.post(url, None, user_text(secrets.token_hex(4), 300), TOKENS)
    until(
        "decode's blocks are free",
        lambda: pair.metrics(url)("vllm:kv_cache_usage_perc") == 0,
        contract.CLAIM_SECONDS + 20,
    )
    assert pinned(pair) == set()


def test_with_bidirectional_off_all_that_is_told_agrees(pair: Pair, without_readback: None) -> None:
    prompt, handle = hit(pair)
    before = pair.metrics(pair.deployment.prefill_url)
    turn = pair.prefill(prompt, handle)
    check(pair, Outcome.DISABLED, prompt, turn, before)
    assert pair.decode(prompt, turn)["choices"][0]["text"] == pair.plain(prompt)


def test_a_conversation_with_bidirectional_off(pair: Pair, without_readback: None) -> None:
    url, name = pair.deployment.router_url, secrets.token_hex(8)
    until("the router sees prefill", lambda: listens(url))
    prompt, seen = user_text(name, 600), []
    for _ in range(2):
        answer = pair.post(url, None, prompt, TOKENS, conversation_id=name)
        text = answer.json()["choices"][0]["text"]
        assert text == pair.plain(prompt)
        assert int(answer.headers.get(contract.HEADER_TOKENS_READ, 0)) == 0
        seen.append(answer.headers[contract.HEADER_REUSE])
        prompt += text + user_text("more", 200)
    assert seen == [Outcome.MISS.value, Outcome.DISABLED.value]
