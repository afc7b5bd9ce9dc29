"""The plugin on a stand-in for vLLM's OpenAI server (a fake: no engine is needed here)."""

import json
import multiprocessing
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pd_connector import plugin
from pd_connector.contract import LOG_STREAM_ACTIVE, LOG_STREAM_INACTIVE

HANDLE = {"do_remote_decode": True, "remote_num_tokens": 3}


class FakeLog:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, message: str, *args: Any) -> None:
        self.lines.append(message % args if args else message)

    warning = info


class FakeOutput:
    def __init__(self, finished: bool, kv_transfer_params: Any = None) -> None:
        self.finished = finished
        self.kv_transfer_params = kv_transfer_params


def finish(index: int) -> str:
    return f'data: {{"choices":[{{"index":{index},"finish_reason":"stop"}}]}}\n\n'


class FakeVllm:
    """The modules that the plugin imports, as vLLM 0.29 has them."""

    def __init__(self) -> None:
        class Serving:
            def __init__(self, kv_transfer_config: Any) -> None:
                config = SimpleNamespace(kv_transfer_config=kv_transfer_config)
                self.engine_client = SimpleNamespace(vllm_config=config)

        class OpenAIServingChat(Serving):
            async def chat_completion_stream_generator(
                self, request: Any, result_generator: AsyncIterator[Any], request_id: str
            ) -> AsyncIterator[str]:
                async for _ in result_generator:
                    yield finish(0)
                yield "data: [DONE]\n\n"

        class OpenAIServingCompletion(Serving):
            async def completion_stream_generator(
                self,
                request: Any,
                engine_inputs: list[Any],
                result_generator: AsyncIterator[Any],
                num_prompts: int,
            ) -> AsyncIterator[str]:
                async for index, _ in result_generator:
                    yield finish(index)
                yield "data: [DONE]\n\n"

        self.log = FakeLog()
        self.chat, self.completion = OpenAIServingChat, OpenAIServingCompletion
        self.chunk = SimpleNamespace(model_fields={"id": None, "choices": None})
        self.output: Any = FakeOutput

    def modules(self) -> dict[str, ModuleType]:
        openai = "vllm.entrypoints.openai"
        contents: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.logger": {"init_logger": lambda name: self.log},
            "vllm.outputs": {"RequestOutput": self.output},
            f"{openai}.chat_completion.protocol": {"ChatCompletionStreamResponse": self.chunk},
            f"{openai}.chat_completion.serving": {"OpenAIServingChat": self.chat},
            f"{openai}.completion.serving": {"OpenAIServingCompletion": self.completion},
        }
        for name in list(contents):
            parts = name.split(".")
            for length in range(1, len(parts)):
                contents.setdefault(".".join(parts[:length]), {})
        modules = {}
        for name, names in contents.items():
            modules[name] = ModuleType(name)
            modules[name].__dict__.update(names, __path__=[])
        return modules


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """Streams alone: what else the plugin installs is not this file's matter."""
    fake = FakeVllm()
    monkeypatch.setattr(plugin.admission, "install", lambda: None)
    monkeypatch.setattr(plugin.workers, "install", lambda: None)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(plugin, "_announced", False)
    yield fake


def load(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    plugin.register()


async def outputs(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def chat(fake: FakeVllm, kv_transfer_config: Any = "nixl") -> list[str]:
    stream = fake.chat(kv_transfer_config).chat_completion_stream_generator(
        SimpleNamespace(n=None), outputs(FakeOutput(True, HANDLE)), request_id="r"
    )
    return [event async for event in stream]


def handles(events: list[str]) -> list[Any]:
    chunks = [json.loads(event[6:]) for event in events if "[DONE]" not in event]
    return [chunk.get("kv_transfer_params") for chunk in chunks]


async def test_chat_streams_carry_the_handle(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(vllm, monkeypatch)
    assert handles(await chat(vllm)) == [HANDLE]


async def test_completion_streams_carry_the_first_prompts_handle_at_the_end(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(vllm, monkeypatch)
    stream = vllm.completion("nixl").completion_stream_generator(
        SimpleNamespace(n=1),
        [],
        outputs((0, FakeOutput(True, HANDLE)), (1, FakeOutput(True, {"other": 1}))),
        num_prompts=2,
    )
    assert handles([event async for event in stream]) == [None, HANDLE]


async def test_loading_twice_changes_nothing(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(vllm, monkeypatch)
    wrapped = vllm.chat.chat_completion_stream_generator
    plugin.register()
    assert vllm.chat.chat_completion_stream_generator is wrapped
    assert handles(await chat(vllm)) == [HANDLE]
    assert vllm.log.lines == [LOG_STREAM_ACTIVE]


async def test_the_log_says_once_per_process_that_it_is_active(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(vllm, monkeypatch)
    assert vllm.log.lines == []
    vllm.chat("nixl")
    vllm.completion("nixl")
    assert vllm.log.lines == [LOG_STREAM_ACTIVE]


async def test_an_engine_that_is_not_disaggregated_is_left_alone(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(vllm, monkeypatch)
    assert handles(await chat(vllm, kv_transfer_config=None)) == [None]
    assert vllm.log.lines == []


async def test_a_vllm_with_the_feature_built_in_is_left_alone(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.chunk.model_fields["kv_transfer_params"] = None
    before = vllm.chat.chat_completion_stream_generator
    load(vllm, monkeypatch)
    assert vllm.chat.chat_completion_stream_generator is before
    assert vllm.log.lines == [f"{LOG_STREAM_INACTIVE}: this vLLM has a field of its own for it"]


async def _no_result_generator(self: Any, request: Any) -> AsyncIterator[str]:
    yield ""


async def _no_generator(self: Any, request: Any, result_generator: Any, num_prompts: int) -> None:
    """Not a generator."""


@pytest.mark.parametrize("other", [_no_result_generator, _no_generator, None])
@pytest.mark.parametrize("where", ["chat", "completion"])
async def test_an_unexpected_vllm_is_left_alone_with_one_warning(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, where: str, other: Any
) -> None:
    method = {
        "chat": "chat_completion_stream_generator",
        "completion": "completion_stream_generator",
    }
    setattr(getattr(vllm, where), method[where], other)
    load(vllm, monkeypatch)
    assert not any(
        hasattr(getattr(getattr(vllm, name), method[name]), "__wrapped__") for name in method
    )
    assert len(vllm.log.lines) == 1
    assert vllm.log.lines[0].startswith(f"{LOG_STREAM_INACTIVE}: ")


async def test_a_missing_class_never_breaks_the_start(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    del vllm.output
    vllm.output = SimpleNamespace
    load(vllm, monkeypatch)
    assert len(vllm.log.lines) == 1


@pytest.mark.parametrize("process", ["VllmWorker-0", "EngineCore_DP0"])
async def test_engine_processes_tell_settings_and_serve_nothing(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    installed: list[str] = []
    monkeypatch.setattr(plugin.workers, "install", lambda: installed.append("settings"))
    monkeypatch.setattr(plugin.admission, "install", lambda: installed.append("checks"))
    monkeypatch.setattr(plugin.idle, "install", lambda: installed.append("sleep"))
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(name=process))
    before = vllm.chat.chat_completion_stream_generator
    load(vllm, monkeypatch)
    assert vllm.chat.chat_completion_stream_generator is before
    assert installed == (["settings"] if "Worker" in process else ["settings", "sleep"])
