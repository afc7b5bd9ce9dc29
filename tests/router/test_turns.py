"""What happens to the handle of a conversation from turn to turn."""

import json
import threading
from typing import Any

import pytest
from router_rig import Answer, Chat, Router, StartRouter, wait_for

from fake_engine import Script


def test_later_turns_read_the_earlier_turn_back(
    router: Router, conversation: str, stream: bool
) -> None:
    chat = Chat(router, conversation, stream)
    held = router.metric("pd_router_handles_held")
    hits = router.metric("pd_router_turns_total", outcome="hit")
    assert chat.say("Hello there").outcome == "miss"
    for text in ("And then?", "And after that?", "Thanks"):
        expected = router.decode[0].handles[-1]["remote_num_tokens"]
        answer = chat.say(text)
        assert (answer.status, answer.outcome) == (200, "hit")
        assert answer.tokens_read == expected
        assert int(answer.headers["x-pd-prompt-tokens"]) > expected
        assert int(answer.headers["x-pd-prefill-ms"]) >= 0
    assert router.metric("pd_router_turns_total", outcome="hit") == hits + 3
    assert router.metric("pd_router_handles_held") == held + 1


def test_decode_gets_the_clients_own_request(router: Router, conversation: str) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 7,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    fields |= {"tools": [{"type": "function", "function": {"name": "f"}}], "min_tokens": 3}
    fields |= {"stream_options": {"include_usage": True}, "max_completion_tokens": 9}
    chat = Chat(router, conversation)
    sent = chat.body("Grüße \U0001f600", **fields)
    answer = chat.say("Grüße \U0001f600", **fields)
    assert answer.chunks[-1]["usage"]["prompt_tokens"] > 0
    del sent["conversation_id"]
    decode = dict(router.decode[0].requests[-1])
    assert decode.pop("kv_transfer_params")["remote_engine_id"] == router.prefill[0].engine_id
    assert decode == sent
    prefill = dict(router.prefill[0].requests[-1])
    prefill.pop("kv_transfer_params")
    gone = {"logprobs", "top_logprobs", "min_tokens", "stream_options"}
    limits = {"stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    assert prefill == {k: v for k, v in sent.items() if k not in gone} | limits


@pytest.mark.parametrize(
    "header", ["X-Conversation-ID", "X-Session-ID", "X-Correlation-ID", "x-my-chat"]
)
def test_a_header_names_the_conversation(router: Router, conversation: str, header: str) -> None:
    chat = Chat(router, None, stream=False)
    headers = {header: conversation}
    answer = router.post(body := chat.body("Hello"), **headers)
    chat.messages = [*body["messages"], answer.message]
    assert router.post(chat.body("Again"), **headers).outcome == "hit"


def test_the_history_names_a_conversation_that_has_no_id(
    router: Router, conversation: str, stream: bool
) -> None:
    chat = Chat(router, None, stream)
    assert chat.say(f"Hello {conversation}").outcome == "miss"
    branch = Chat(router, None, stream, messages=list(chat.messages))
    assert [chat.say("Again").outcome, chat.say("More").outcome] == ["hit", "hit"]
    # The first turn's handle is used up; nobody gets it a second time.
    assert branch.say("Another way").outcome == "miss"
    assert branch.say("And on").outcome == "hit"
    other = Chat(router, None, stream, key="Bearer other", messages=list(chat.messages))
    assert other.say("Mine").outcome == "miss"


def test_a_text_names_its_conversation_too(router: Router, conversation: str) -> None:
    body = {"model": "fake", "prompt": f"{conversation} " + "Once upon a time " * 200}
    first = router.post(body, "/v1/completions")
    body["prompt"] += first.text + " and on"
    assert router.post(body, "/v1/completions").outcome == "hit"


def test_an_edited_history_is_recomputed(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    chat.messages[0]["content"] = "Hullo"
    assert chat.say("Again").outcome == "history_changed"
    assert chat.say("Once more").outcome == "hit"


def test_an_edited_answer_is_recomputed(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    chat.messages[1]["content"] += " "
    assert chat.say("Again").outcome == "history_changed"


def test_a_truncated_history_is_recomputed(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    chat.say("Again")
    chat.messages = chat.messages[2:]
    assert chat.say("More").outcome == "history_changed"


def test_a_repeated_request_is_recomputed(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    chat.messages = []
    assert chat.say("Hello").outcome == "history_changed"
    # Nothing is added to the history that the handle describes.
    answer = router.post(chat.body("") | {"messages": chat.messages})
    assert answer.outcome == "history_changed"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "x"}]},
        {"cache_salt": "salt"},
        {"reasoning_effort": "low"},
        {"some_field_of_tomorrow": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_field_that_can_shape_the_prompt_must_stay(
    router: Router, conversation: str, change: dict[str, object]
) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    assert chat.say("Again", **change).outcome == "history_changed"


def test_sampling_fields_may_change(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    answer = chat.say("Again", temperature=0.1, seed=3, max_tokens=9, user="u", stop=["x"])
    assert answer.outcome == "hit"


def test_absent_and_empty_values_are_the_same_message(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.messages = [{"role": "system"}]
    chat.say("Hello")
    chat.messages[0]["content"] = ""
    chat.messages[1]["name"] = None
    chat.messages[2] |= {"refusal": None, "tool_calls": [], "audio": None}
    assert chat.say("Again").outcome == "hit"


def test_parallel_requests_never_share_a_handle(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    bodies = [chat.body(f"Branch {i}") for i in range(6)]
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda body=body: answers.append(router.post(body)))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes = sorted(answer.outcome for answer in answers)
    assert [answer.status for answer in answers] == [200] * 6
    # A branch that finished first leaves a handle that another branch does not continue.
    assert outcomes.count("hit") == 1
    assert set(outcomes) <= {"hit", "miss", "history_changed"}


def test_a_second_request_while_the_first_runs_is_a_miss(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    router.decode[0].hold_after = 2
    first: list[Answer] = []
    thread = threading.Thread(target=lambda: first.append(router.post(chat.body("One"))))
    thread.start()
    wait_for(lambda: len(router.decode[0].requests) == 2, "the first request decodes")
    second = threading.Thread(target=lambda: first.append(router.post(chat.body("Two"))))
    second.start()
    wait_for(lambda: len(router.decode[0].requests) == 3, "the second request decodes")
    router.decode[0].released.set()
    thread.join()
    second.join()
    assert sorted(answer.outcome for answer in first) == ["hit", "miss"]


def test_tenants_do_not_share_a_conversation_id(router: Router, conversation: str) -> None:
    one = Chat(router, conversation, key="Bearer one")
    two = Chat(router, conversation, key="Bearer two")
    one.say("Hello")
    two.messages = list(one.messages)
    assert two.say("Again").outcome == "miss"
    assert one.say("Again").outcome == "hit"
    sent = router.prefill[0].request_headers[-1]
    assert sent["Authorization"] == "Bearer one"


def test_tool_calls_are_reused_when_the_engine_proves_the_tokens(
    router: Router, conversation: str, stream: bool
) -> None:
    chat = Chat(router, conversation, stream)
    script = tool_script()
    router.decode[0].scripts.append(script)
    answer = chat.say("What is the weather?")
    assert answer.message["tool_calls"] == script.tool_calls
    chat.messages.append({"role": "tool", "tool_call_id": "call-1", "content": "rain"})
    assert chat.say("And tomorrow?").outcome == "hit"


def test_tool_calls_with_other_arguments_are_recomputed(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    router.decode[0].scripts.append(tool_script())
    chat.say("What is the weather?")
    chat.messages[-1]["tool_calls"][1]["function"]["arguments"] = '{"city": "Rome"}'
    assert chat.say("And tomorrow?").outcome == "history_changed"


def test_of_a_turn_whose_reasoning_the_template_drops_the_rest_is_read(
    router: Router, conversation: str, stream: bool
) -> None:
    chat = Chat(router, conversation, stream)
    router.decode[0].scripts.append(Script(content="42", reasoning="6 times 7"))
    chat.say("How much?")
    answer = chat.say("Sure?")
    # The handle went out, and the engine saw where the tokens part.
    sent = router.prefill[0].requests[-1]["kv_transfer_params"]
    assert answer.outcome == "hit"
    assert 0 < answer.tokens_read < sent["remote_num_tokens"]


def tool_script() -> Script:
    call = {"id": "call-1", "type": "function"}
    return Script(
        content="Let me look.",
        tool_calls=[
            {**call, "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {**call, "id": "call-2", "function": {"name": "weather", "arguments": '{"x": 1}'}},
        ],
        finish_reason="tool_calls",
    )


@pytest.mark.parametrize("finish_reason", ["error", "abort", "content_filter"])
def test_an_answer_that_did_not_end_well_leaves_no_handle(
    router: Router, conversation: str, stream: bool, finish_reason: str
) -> None:
    chat = Chat(router, conversation, stream)
    router.decode[0].scripts.append(Script(content="x", finish_reason=finish_reason))
    chat.say("Hello")
    assert chat.say("Again").outcome == "miss"


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"use_beam_search": True}, {"echo": True}, {"prompt_logprobs": 1}]
)
def test_requests_that_two_legs_cannot_share_go_to_decode_alone(
    router: Router, conversation: str, stream: bool, fields: dict[str, object]
) -> None:
    chat = Chat(router, conversation, stream)
    chat.say("Hello")
    answer = router.post(chat.body("Again", **fields))
    assert (answer.status, answer.headers["x-pd-route"]) == (200, "append")
    assert "kv_transfer_params" not in router.decode[0].requests[-1]
    assert len(router.prefill[0].requests) == 1
    if "n" in fields:
        choices = answer.chunks if stream else [answer.json]
        assert {c["index"] for chunk in choices for c in chunk["choices"]} == {0, 1}
    # The handle of the turn before is still good.
    assert chat.say("And now?").outcome == "hit"


def test_completions_continue_a_text_prompt(
    router: Router, conversation: str, stream: bool
) -> None:
    body = {"model": "fake", "stream": stream, "conversation_id": conversation}
    first = router.post(body | {"prompt": "Once upon"}, "/v1/completions")
    assert first.outcome == "miss"
    prompt = "Once upon" + first.text + " a time"
    second = router.post(body | {"prompt": prompt}, "/v1/completions")
    assert second.outcome == "hit"
    third = router.post(body | {"prompt": prompt + second.text[:-1]}, "/v1/completions")
    assert third.outcome == "history_changed"


def test_completions_of_token_ids_are_proven_by_the_engine(
    router: Router, conversation: str
) -> None:
    body = {"model": "fake", "conversation_id": conversation}
    router.post(body | {"prompt": [1, 2, 3]}, "/v1/completions")
    answer = router.post(body | {"prompt": [1, 2, 3, 4]}, "/v1/completions")
    # The ids go on differently than the answer did; only the engine can see that.
    assert router.prefill[0].requests[-1]["kv_transfer_params"]["remote_block_ids"]
    assert answer.outcome == "history_changed"
    assert router.post(body | {"prompt": [9, 2, 3, 4, 5]}, "/v1/completions").status == 200
    assert "null" in json.dumps(router.prefill[0].requests[-1]["kv_transfer_params"])


def test_several_prompts_go_to_decode_alone(router: Router, conversation: str) -> None:
    body = {"model": "fake", "conversation_id": conversation, "prompt": ["a", "b"]}
    answer = router.post(body, "/v1/completions")
    assert (answer.status, answer.outcome) == (200, "miss")
    assert router.prefill[0].requests == []


def stock_router(start_router: StartRouter, **settings: Any) -> Router:
    """A router of a deployment without the connector, where equal messages are trusted."""
    router = start_router(**{"connector": "stock", "reuse_proof": "messages"} | settings)
    for engine in router.engines:
        engine.stock = True
    return router


def test_text_that_hides_tokens_needs_their_proof(start_router: StartRouter) -> None:
    router = stock_router(start_router)
    image = {"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}}
    cat = {"role": "user", "content": [{"type": "text", "text": "A cat"}, image]}
    chat = Chat(router, "image", messages=[cat])
    chat.say("What is it?")
    assert chat.say("Sure?").outcome == "history_changed"
    doubtful = [
        Script(content="42", reasoning="6 times 7"),
        Script(content="42", stop_reason="END", generated="42END"),
        Script(content="<think>6 times 7</think>42"),
        Script(content=" 42"),
        Script(content="4\ufffd"),
        tool_script(),
    ]
    for number, script in enumerate(doubtful):
        chat = Chat(router, f"doubtful-{number}", stream=bool(number % 2))
        router.decode[0].scripts.append(script)
        chat.say("How much?")
        assert chat.say("Sure?").outcome == "history_changed", script
    chat = Chat(router, "plain")
    chat.say("How much?")
    answer = chat.say("Sure?")
    assert (answer.outcome, answer.tokens_read > 0) == ("hit", True)
    router.prefill[0].report_usage_details = False
    assert chat.say("Really?").outcome == "failed"
    tools = Chat(router, "tools", fields={"tools": [{"function": {"name": "f"}}]})
    tools.say("How much?")
    assert tools.say("Sure?").outcome == "history_changed"


def test_bidirectional_off_keeps_and_sends_nothing(start_router: StartRouter) -> None:
    router = start_router(bidirectional=False)
    chat = Chat(router, "c")
    assert [chat.say("Hello").outcome, chat.say("Again").outcome] == ["disabled", "disabled"]
    assert all(
        body["kv_transfer_params"]["remote_block_ids"] is None
        for body in router.prefill[0].requests
    )
    assert router.metric("pd_router_handles_stored_total") == 0
    assert router.metric("pd_router_handles_sent_total") == 0


def test_a_prefill_leg_with_bidirectional_off_recomputes(router: Router, conversation: str) -> None:
    router.prefill[0].bidirectional = False
    chat = Chat(router, conversation)
    chat.say("Hello")
    assert chat.say("Again").outcome == "disabled"


def test_handles_expire(start_router: StartRouter) -> None:
    router = start_router(ttl=2, handle_ttl=0.2, decode_ttl=2)
    chat = Chat(router, "c")
    chat.say("Hello")
    wait_for(lambda: router.metric("pd_router_handles_held") == 0, "the handle expires")
    assert chat.say("Again").outcome == "expired"
    assert router.metric("pd_router_handles_sent_total") == 0


def test_a_handle_that_the_engine_declines_is_expired(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    router.prefill[0].margin = 1e6
    assert chat.say("Again").outcome == "expired"


def test_a_stock_engine_that_declines_fails_the_readback(start_router: StartRouter) -> None:
    router = stock_router(start_router)
    chat = Chat(router, "c")
    chat.say("Hello")
    router.prefill[0].margin = 1e6
    answer = chat.say("Again")
    assert (answer.status, answer.outcome) == (200, "failed")


def test_a_stock_engine_that_declines_near_the_end_of_life_means_expired(
    start_router: StartRouter,
) -> None:
    router = stock_router(start_router, handle_ttl=3.9, decode_ttl=4)
    chat = Chat(router, "c")
    chat.say("Hello")
    router.prefill[0].margin = 1e6
    answer = chat.say("Again")
    assert (answer.status, answer.outcome) == (200, "expired")


def test_with_the_connector_a_handle_without_proof_is_not_sent(start_router: StartRouter) -> None:
    router = start_router(connector="pdctl")
    router.decode[0].stock = True
    chat = Chat(router, "c")
    chat.say("Hello")
    assert chat.say("Again").outcome == "history_changed"
    assert router.metric("pd_router_handles_sent_total") == 0


def test_no_tokens_read_near_the_end_of_life_means_expired(start_router: StartRouter) -> None:
    router = stock_router(start_router, handle_ttl=3.9, decode_ttl=4)
    chat = Chat(router, "c")
    chat.say("Hello")
    router.prefill[0].report_usage_details = False
    assert chat.say("Again").outcome == "expired"


def test_the_oldest_handles_make_room(start_router: StartRouter) -> None:
    router = start_router(max_handles=2)
    chats = [Chat(router, f"c{i}") for i in range(3)]
    for chat in chats:
        chat.say("Hello")
    assert router.metric("pd_router_handles_held") == 2
    assert [chat.say("Again").outcome for chat in reversed(chats)] == ["hit", "hit", "miss"]


def test_a_conversation_stays_with_its_decode_leg(start_router: StartRouter) -> None:
    router = start_router(decodes=2, prefills=2)
    chats = [Chat(router, f"c{i}") for i in range(4)]
    for text in ("Hello", "Again", "More"):
        for chat in chats:
            chat.say(text)
    assert router.metric("pd_router_turns_total", outcome="hit") == 8
    assert [len(engine.requests) for engine in router.engines] == [6, 6, 6, 6]
