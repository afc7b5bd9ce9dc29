"""The handle in a streamed answer: one field more on one chunk, all else untouched."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.stream import HandleTap, add_handle, finish_chunk, with_handle

HANDLE = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_host": "ünï", "x": None}
OTHER = {"do_remote_decode": True, "remote_block_ids": [[9]]}
DONE = "data: [DONE]\n\n"


@dataclass
class Output:
    """What of an engine output matters here."""

    finished: bool = False
    kv_transfer_params: dict[str, Any] | None = None


def chunk(text: str = "", finish: str | None = None, index: int = 0, **more: Any) -> str:
    choice = {"index": index, "delta": {"content": text}, "logprobs": None}
    body = {"id": "c", "choices": [{**choice, "finish_reason": finish}], **more}
    return f"data: {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n"


USAGE = 'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3}}\n\n'


async def answer(steps: list[tuple[Any, list[str]]], choices: int = 1, **tap: Any) -> list[str]:
    """The events that a client sees of ``steps``: an engine output, then its events."""

    async def outputs() -> AsyncIterator[Any]:
        for output, _ in steps:
            yield output

    tapped = HandleTap(outputs(), tap.get("pick", lambda item: item))

    async def events() -> AsyncGenerator[str, None]:
        sent = iter(steps)
        async for _ in tapped:
            for event in next(sent)[1]:
                yield event
        for event in tap.get("tail", [DONE]):
            yield event

    return [event async for event in with_handle(events(), tapped, choices)]


def sent(steps: list[tuple[Any, list[str]]], tail: tuple[str, ...] = (DONE,)) -> list[str]:
    return [event for _, events in steps for event in events] + list(tail)


def changed(before: list[str], after: list[str]) -> dict[int, dict[str, Any]]:
    """The added fields, by event; asserts that nothing else changed."""
    assert len(before) == len(after)
    added = {}
    for at, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        old_body, new_body = json.loads(old[6:]), json.loads(new[6:])
        assert new.startswith(old.rstrip("\n").removesuffix("}"))
        assert new.endswith("\n\n")
        added[at] = {key: new_body.pop(key) for key in set(new_body) - set(old_body)}
        assert new_body == old_body
    return added


async def test_the_finish_chunk_gains_the_handle_and_nothing_else_changes() -> None:
    steps = [
        (Output(), [chunk(role) for role in ("", "a")]),
        (Output(finished=True, kv_transfer_params=HANDLE), [chunk("b", "stop")]),
    ]
    assert changed(sent(steps), await answer(steps)) == {2: {"kv_transfer_params": HANDLE}}


async def test_the_handle_stays_before_the_usage_chunk() -> None:
    steps = [(Output(True, HANDLE), [chunk("b", "length", usage={"total_tokens": 4})])]
    got = await answer(steps, tail=[USAGE, DONE])
    assert changed(sent(steps, (USAGE, DONE)), got) == {0: {"kv_transfer_params": HANDLE}}


async def test_with_several_choices_the_very_last_finish_chunk_has_it() -> None:
    steps = [
        (Output(kv_transfer_params=OTHER), [chunk("a", "stop", 1)]),
        (Output(), [chunk("b", None, 0)]),
        (Output(True, HANDLE), [chunk("c", "length", 0)]),
    ]
    assert changed(sent(steps), await answer(steps, 2)) == {2: {"kv_transfer_params": HANDLE}}


async def test_choices_that_finish_in_one_output() -> None:
    steps = [(Output(True, HANDLE), [chunk("a", "stop", 0), chunk("b", "stop", 1)])]
    assert changed(sent(steps), await answer(steps, 2)) == {1: {"kv_transfer_params": HANDLE}}


async def test_of_several_prompts_the_first_ones_handle_is_taken() -> None:
    steps = [
        ((0, Output(True, HANDLE)), [chunk("a", "stop", 0)]),
        ((1, Output(True, OTHER)), [chunk("b", "stop", 1)]),
    ]
    got = await answer(steps, 2, pick=lambda item: item[1] if item[0] == 0 else None)
    assert changed(sent(steps), got) == {1: {"kv_transfer_params": HANDLE}}


@pytest.mark.parametrize("reason", ["abort", "stop"])
async def test_an_answer_without_a_handle_is_untouched(reason: str) -> None:
    steps = [(Output(True, None), [chunk("a", reason)])]
    assert await answer(steps) == sent(steps)


async def test_a_choice_that_never_finishes_adds_nothing() -> None:
    error = 'data: {"error":{"message":"finish_reason","type":"x"}}\n\n'
    steps = [(Output(kv_transfer_params=HANDLE), [chunk("a", "stop", 0)])]
    assert await answer(steps, 2, tail=[error, DONE]) == sent(steps, (error, DONE))


@pytest.mark.parametrize("field", [HANDLE, None], ids=["handle", "null"])
async def test_a_field_that_is_there_already_is_left_alone(field: Any) -> None:
    steps = [(Output(True, OTHER), [chunk("a", "stop", kv_transfer_params=field)])]
    assert await answer(steps) == sent(steps)


@pytest.mark.parametrize(
    "text",
    ['"finish_reason":"stop"', 'finish_reason":"', '{"choices":[{"finish_reason":"stop"}]}', "}"],
)
async def test_text_that_looks_like_a_finish_is_text(text: str) -> None:
    steps = [
        (Output(), [chunk(text)]),
        (Output(True, HANDLE), [chunk(text, "stop")]),
    ]
    assert changed(sent(steps), await answer(steps)) == {1: {"kv_transfer_params": HANDLE}}


async def test_tool_calls_and_logprobs_that_name_the_field() -> None:
    call = {"tool_calls": [{"function": {"arguments": '{"finish_reason":"stop"}'}}]}
    nested = 'data: {"choices":[{"delta":{"finish_reason":"x"},"finish_reason":null}]}\n\n'
    steps = [
        (Output(), [nested, chunk(json.dumps(call))]),
        (Output(True, HANDLE), [chunk("", "tool_calls", logprobs={"finish_reason": "a"})]),
    ]
    assert changed(sent(steps), await answer(steps)) == {2: {"kv_transfer_params": HANDLE}}


@settings(deadline=None)
@given(text=st.text(), finish=st.sampled_from(["stop", "length", "tool_calls"]))
def test_any_text_survives(text: str, finish: str) -> None:
    event = chunk(text, finish)
    got = add_handle(event, HANDLE)
    assert changed([event], [got]) == {0: {"kv_transfer_params": HANDLE}}
    assert finish_chunk(chunk(text)) is None
    assert finish_chunk(event) is not None


@pytest.mark.parametrize(
    "event",
    [
        DONE,
        USAGE,
        ": ping\n\n",
        'data: {"finish_reason":"broken\n\n',
        'data: {"choices":"finish","finish_reason":"stop"}\n\n',
        'data: {"choices":["finish"],"finish_reason":"stop"}\n\n',
    ],
)
def test_other_events_are_no_finish_chunks(event: str) -> None:
    assert finish_chunk(event) is None


async def test_a_client_that_leaves_closes_the_engines_stream() -> None:
    closed = []

    async def nothing() -> AsyncIterator[Any]:
        return
        yield

    async def events() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield chunk("a")
        finally:
            closed.append(True)

    stream = with_handle(events(), HandleTap(nothing(), lambda item: item), 1)
    assert await anext(stream) == chunk("a")
    await stream.aclose()
    assert closed == [True]
