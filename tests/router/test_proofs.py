"""What has to be shown before a handle is sent, for every reuse_proof."""

from typing import Any

import pytest
from router_rig import Chat, Router, StartRouter

from fake_engine import Script


def tokens_router(start_router: StartRouter, **settings: Any) -> Router:
    """Stock engines, and a router that compares token ids."""
    router = start_router(connector="stock", **settings)
    for engine in router.engines:
        engine.stock = True
    return router


def test_token_ids_prove_a_turn_to_stock_engines(start_router: StartRouter, stream: bool) -> None:
    router = tokens_router(start_router)
    chat = Chat(router, "c", stream)
    assert chat.say("Hello").outcome == "miss"
    for text in ("Again", "And again"):
        held = router.decode[0].handles[-1]["remote_num_tokens"]
        answer = chat.say(text)
        assert (answer.outcome, answer.tokens_read) == ("hit", held)
    assert router.metric("pd_router_info", reuse_proof="tokens") == 1
    for body in router.decode[0].tokenized:
        assert body.keys() == {"model", "messages"}


def test_completions_are_proven_by_their_ids(start_router: StartRouter, stream: bool) -> None:
    router = tokens_router(start_router)
    body: dict[str, Any] = {"model": "fake", "stream": stream, "conversation_id": "c"}
    first = router.post(body | {"prompt": "Once upon"}, "/v1/completions")
    prompt = "Once upon" + first.text + " a time"
    assert router.post(body | {"prompt": prompt}, "/v1/completions").outcome == "hit"


@pytest.mark.parametrize(
    "script",
    [
        Script(content="42", reasoning="6 times 7"),
        Script(content="42", stop_reason="END", generated="42END"),
        Script(content="42", generated="4 2"),
    ],
    ids=["reasoning", "stop", "drift"],
)
def test_other_tokens_than_the_text_says_are_not_reused(
    start_router: StartRouter, script: Script
) -> None:
    router = tokens_router(start_router)
    chat = Chat(router, "c")
    router.decode[0].scripts.append(script)
    chat.say("How much?")
    assert chat.say("Sure?").outcome == "history_changed"
    assert router.metric("pd_router_handles_refused_total", reason="tokens_differ") == 1
    assert router.metric("pd_router_handles_sent_total") == 0
    assert chat.say("Really?").outcome == "hit"


def test_images_are_not_told_apart_by_token_ids(start_router: StartRouter) -> None:
    router = tokens_router(start_router)
    image = {"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}}
    chat = Chat(router, "c", messages=[{"role": "user", "content": [image]}])
    chat.say("What is it?")
    assert chat.say("Sure?").outcome == "history_changed"


def test_the_client_does_not_see_the_ids(start_router: StartRouter, stream: bool) -> None:
    router = tokens_router(start_router)
    chat = Chat(router, "c", stream)
    for text in ("Hello", "Again"):
        answer = chat.say(text)
        choices = [
            c for part in (answer.chunks if stream else [answer.json]) for c in part["choices"]
        ]
        assert all(choice.get("token_ids") is None for choice in choices)
        assert b"prompt_token_ids" not in answer.raw.replace(b'"prompt_token_ids":null', b"")
    asked = router.post(chat.body("More", return_token_ids=True))
    parts = asked.chunks if stream else [asked.json]
    assert parts[0]["prompt_token_ids"]
    ids = [token for part in parts for c in part["choices"] for token in c.get("token_ids") or []]
    assert "".join(map(chr, ids)).startswith("answer-")


def test_a_repeated_prompt_is_tokenized_once(start_router: StartRouter) -> None:
    router = tokens_router(start_router)
    chat = Chat(router, "c")
    chat.say("Hello")
    for _ in range(3):
        # Prefill fails with the handle and without it: the client tries again.
        router.prefill[0].faults.extend([500, 500])
        chat.say("Again")
        chat.messages = chat.messages[:2]
    asked = [body["messages"][-1]["content"] for body in router.decode[0].tokenized]
    assert asked == ["Again"]


def test_prefill_has_the_last_word_on_its_tokens(start_router: StartRouter) -> None:
    router = tokens_router(start_router)
    chat = Chat(router, "c")
    chat.say("Hello")
    # The endpoint of ids renders other than prefill: what it proves is not prefill's prompt.
    router.prefill[0].says_ids = [1] * 1000
    answer = chat.say("Again")
    assert (answer.status, answer.outcome, answer.tokens_read) == (200, "history_changed", 0)
    assert router.prefill[0].requests[-1]["kv_transfer_params"]["remote_block_ids"] is None


def test_without_a_tokenizer_nothing_is_proven(start_router: StartRouter) -> None:
    router = tokens_router(start_router)
    chat = Chat(router, "c")
    chat.say("Hello")
    router.decode[0].tokenizer = False
    assert chat.say("Again").outcome == "history_changed"


def test_proof_off_keeps_nothing_and_gives_back(start_router: StartRouter) -> None:
    router = start_router(reuse_proof="off")
    chat = Chat(router, "c")
    assert [chat.say("Hello").outcome, chat.say("Again").outcome] == ["disabled", "disabled"]
    assert router.metric("pd_router_handles_stored_total") == 0
    decode = router.decode[0]
    router.wait_released({handle["remote_request_id"] for handle in decode.handles})


def long_chat(router: Router, conversation: str) -> Chat:
    """A conversation with much to share, of two turns."""
    chat = Chat(router, conversation)
    chat.messages = [{"role": "system", "content": "Be brief. " * 20}]
    chat.say("Hello " * 30)
    chat.say("Again " * 30)
    return chat


def test_what_agrees_of_a_truncated_history_is_read(router: Router, conversation: str) -> None:
    chat = long_chat(router, conversation)
    chat.messages = chat.messages[:3]
    answer = chat.say("Something else")
    held = router.prefill[0].requests[-1]["kv_transfer_params"]["remote_num_tokens"]
    assert answer.outcome == "hit"
    assert 0.5 * held < answer.tokens_read < held


def test_an_early_edit_is_not_worth_the_handle(router: Router, conversation: str) -> None:
    chat = long_chat(router, conversation)
    before = list(chat.messages)
    chat.messages[1] = {"role": "user", "content": "Goodbye " * 30}
    assert chat.say("Well").outcome == "history_changed"
    # The unedited conversation goes on with its own handle.
    chat.messages = before
    assert chat.say("Well").outcome == "hit"


def test_a_request_beside_the_conversation_leaves_its_handle(
    router: Router, conversation: str
) -> None:
    chat = long_chat(router, conversation)
    title = [chat.messages[0], {"role": "user", "content": "A title for: Hello"}]
    aside = router.post(chat.body("") | {"messages": title})
    assert aside.outcome == "history_changed"
    assert chat.say("Well").outcome == "hit"
