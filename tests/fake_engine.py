"""A fake prefill or decode engine: vLLM's HTTP shapes over a strict ledger of KV blocks.

It has no model. A prompt's tokens are the characters of its rendered text, and an answer is
a function of them. Prefill and decode read each other's blocks over HTTP where real engines
use NIXL. Whatever a real engine lets pass in silence (a handle used twice, expired, altered,
of another engine, or of other tokens than the prompt's) is kept in ``violations``.

Run one by hand: ``python tests/fake_engine.py --role decode --port 8200``.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

# What the real engine sends (vLLM 0.29: nixl/pull_scheduler.py request_finished,
# openai/chat_completion/protocol.py, openai/completion/protocol.py).
HANDLE_KEYS = frozenset(
    {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
    }
)
CHUNK_KEYS = frozenset({"id", "object", "created", "model", "choices"})
LAST_CHUNK_KEYS = CHUNK_KEYS | {"kv_transfer_params"}
"""Keys of a chunk that ends a choice; without ``include_usage`` vLLM may add
``system_fingerprint``, and to a chat's first chunk ``prompt_token_ids``."""
CHAT_CHOICE_KEYS = frozenset({"index", "delta", "logprobs", "finish_reason"})
"""Keys of every chat choice; all but the first, which brings the role, add ``token_ids``."""
LAST_CHAT_CHOICE_KEYS = CHAT_CHOICE_KEYS | {"stop_reason", "token_ids"}
TEXT_CHOICE_KEYS = frozenset(
    {
        "index",
        "text",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "prompt_token_ids",
        "token_ids",
    }
)

BLOCK = 16
ECHO_400 = "400-echo"
"""A validation error that repeats the whole request body, as vLLM's do."""
UNREAD_400 = "400-unread"
"""A validation error before the path is looked at: in OpenAI's form on every path."""
NO_PATH = "404-path"
"""A path that the model at hand does not have: in neither form."""


@dataclass
class Blocks:
    """KV of one finished request, waiting to be read."""

    tokens: str
    params: dict[str, Any]
    deadline: float
    reads: int = 0
    released: bool = False


@dataclass
class Script:
    """What decode is to answer."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    generated: str | None = None
    """The tokens behind the answer, where they differ from its text."""
    piece: int = 3
    """Characters of a stream's chunk."""


class FakeEngine:
    """One engine on a thread of its own. Attributes are settings; tests change them."""

    def __init__(
        self, role: str, *, ttl: float = 480, margin: float = 5, stock: bool = False
    ) -> None:
        self.role = role
        self._ttl = ttl
        self._margin = margin
        self._stock = stock
        self.port = 0
        self.host = "127.0.0.1"
        self.engine_id = ""
        self.ranks = 1
        """Data-parallel ranks: requests go to them in turn, each with an engine id of its own."""
        self._turns = itertools.count()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.reset()

    def reset(self) -> None:
        """Default behaviour, empty records; blocks stay."""
        self.ttl = self._ttl
        self.stock = self._stock
        self.report_usage_details = True
        self.bidirectional = True
        self.omit_handles = False
        self.model = "fake"
        self.faults: deque[Any] = deque()
        self.scripts: deque[Script] = deque()
        self.write_size = 0
        self.hold_after: int | None = None
        self.trickle = False
        """Until ``released`` a stream's events come one by one and slowly."""
        self.held = 0
        """Streams that have come to ``hold_after``."""
        self.released = threading.Event()
        self.violations: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.request_headers: list[dict[str, str]] = []
        self.handles: list[dict[str, Any]] = []
        self.others: list[dict[str, Any]] = []
        """Requests of other paths: method, path, query, headers, body."""
        self.aborted = 0
        self.reads = 0
        self.healthy = True
        self.leases = not self._stock
        self.tokenizer = True
        self.lease_posts = 0
        self.looked_at = 0
        self.reads_fail = False
        self.says_ids: list[int] | None = None
        self.released_turns: list[str] = []
        self.renewals: list[str] = []
        self.lease_faults = 0
        self.lease_silence = False
        """Orders about leases are taken and never answered."""
        self.tokenized: list[dict[str, Any]] = []
        self.cached: list[str] = []
        self.margin = self._margin
        if not hasattr(self, "blocks"):
            self.blocks: dict[str, Blocks] = {}

    # Running it.

    def start(self, port: int = 0) -> "FakeEngine":
        """Listen (again); every start is a new engine that holds no blocks."""
        self.engine_id = f"fake-{self.role}-{uuid.uuid4().hex}"
        self.started = time.time()
        self.blocks = {}
        ready = threading.Event()
        failure: list[BaseException] = []

        async def listen() -> None:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_post("/v1/chat/completions", self._generate)
            app.router.add_post("/v1/completions", self._generate)
            app.router.add_post("/fake/read", self._serve_blocks)
            app.router.add_get("/v1/models", self._models)
            app.router.add_get("/health", self._health)
            app.router.add_post("/tokenize", self._tokenize)
            app.router.add_get("/metrics", self._metrics)
            app.router.add_post("/pd/leases", self._leases)
            app.router.add_get("/fake/left/{turn}", self._left)
            self._session = aiohttp.ClientSession()
            app.router.add_route("*", "/{path:.*}", self._other)
            self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
            await self._runner.setup()
            site = web.TCPSite(self._runner, self.host, port or self.port)
            await site.start()
            self.port = self._runner.addresses[0][1]

        def run() -> None:
            self._loop = asyncio.new_event_loop()
            try:
                self._loop.run_until_complete(listen())
            except BaseException as error:
                failure.append(error)
                ready.set()
                return
            ready.set()
            self._loop.run_forever()
            self._loop.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        ready.wait()
        if failure:
            raise failure[0]
        return self

    def restart(self) -> None:
        """Be a new engine that holds no blocks, with nobody noticing a gap."""
        self.engine_id = f"fake-{self.role}-{uuid.uuid4().hex}"
        self.blocks = {}
        self.started = time.time()

    def stop(self) -> None:
        """Go away as a killed process does: every connection is reset."""
        loop, runner, session = self._loop, self._runner, self._session
        if loop is None or runner is None or session is None:
            return

        async def close() -> None:
            for site in list(runner.sites):
                await site.stop()
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()
            await session.close()

        asyncio.run_coroutine_threadsafe(close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        if self._thread:
            self._thread.join(10)
        self._loop = None

    def _rank_ids(self) -> list[str]:
        if self.ranks == 1:
            return [self.engine_id]
        return [f"{self.engine_id}_dp{rank}" for rank in range(self.ranks)]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def secrets(self) -> list[str]:
        """Strings that no client may ever see."""
        ids = [str(params["remote_request_id"]) for params in self.handles]
        words = ["remote_", "do_remote", "kv_transfer_params", "pd_reuse", "pd_tokens"]
        return [self.engine_id, self.url.removeprefix("http://"), *words, *ids]

    # Answering.

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        self.request_headers.append(dict(request.headers))
        try:
            fault = self.faults.popleft() if self.faults else None
            if (answer := await self._fail(request, body, fault)) is not None:
                return answer
            prompt = render(body)
            tokens_read, reuse = await self._receive(body, prompt)
            return await self._answer(request, body, prompt, tokens_read, reuse, fault)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        except ConnectionResetError:
            self.aborted += 1
            return web.Response()
        except EngineFailure as failure:
            return _error(500, str(failure))

    async def _fail(
        self, request: web.Request, body: dict[str, Any], fault: Any
    ) -> web.Response | None:
        if isinstance(fault, int):
            if fault < 500 and request.path.startswith("/v1/messages"):
                return _anthropic_error(fault, self.url)
            return _error(fault, f"{self.url}" + f" is {self.engine_id}" * (fault >= 500))
        if fault == ECHO_400:
            text = f"1 validation error:\n  {{'msg': 'Value error, no.', 'input': {body}}}"
            return _error(400, text)
        if fault == UNREAD_400:
            return _error(400, "1 validation error:\n  {'msg': 'Input should be a valid list'}")
        if fault == NO_PATH:
            return web.json_response({"detail": "Not Found"}, status=404)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(3600)
        return None

    async def _receive(self, body: dict[str, Any], prompt: str) -> tuple[int, str | None]:
        """Read the blocks that ``kv_transfer_params`` name: tokens read, reuse outcome."""
        params = body.get("kv_transfer_params")
        if self.role == "decode":
            if params and params.get("remote_block_ids"):
                if body.get("n", 1) != 1:
                    self.violations.append("several choices share one handle")
                tokens = await self._read(params)
                if tokens != prompt:
                    self.violations.append("decode got another prompt's blocks")
                return len(tokens), None
            if params and params.get("pd_previous"):
                self._release(params["pd_previous"])
            return self._prefix_cached(prompt), None
        if not params or params.get("do_remote_decode") is not True:
            self.violations.append("prefill was not asked to keep its blocks")
            return 0, None
        if body.get("stream") or body.get("max_tokens") != 1:
            self.violations.append("prefill was asked for more than one token")
        if not params.get("remote_block_ids"):
            return 0, "miss"
        return await self._read_back(params, prompt)

    async def _read_back(self, params: dict[str, Any], prompt: str) -> tuple[int, str]:
        if not self.bidirectional:
            return 0, "disabled"
        proof = params.get("pd_tokens")
        proven = params["remote_num_tokens"]
        if proof and not self.stock:
            proven = tokens_proven(proof, prompt)
            if not proven:
                self._tell_released(params)
                return 0, "history_changed"
        if await self._seconds_left(params) < self.margin:
            if self.stock:
                raise EngineFailure("Internal server error")
            return 0, "expired"
        tokens = (await self._read(params))[:proven]
        if not prompt.startswith(tokens):
            self.violations.append("prefill read blocks of other tokens than its prompt's")
        return min(len(tokens), len(prompt) - 1), "hit"

    async def _seconds_left(self, params: dict[str, Any]) -> float:
        """Of a turn that decode may have renewed since it made the handle; a stock prefill has
        the handle alone to tell."""
        left = params["remote_blocks_expiry_time"] - time.perf_counter()
        if left >= self.margin or self.stock or self._session is None:
            return float(left)
        url = f"http://127.0.0.1:{params['remote_port']}/fake/left/{params['remote_request_id']}"
        async with self._session.get(url) as answer:
            return float(await answer.text())

    async def _left(self, request: web.Request) -> web.Response:
        blocks = self.blocks.get(request.match_info["turn"])
        return web.Response(text=str(blocks.deadline - time.perf_counter() if blocks else -1))

    async def _read(self, params: dict[str, Any]) -> str:
        if not params.keys() >= HANDLE_KEYS:
            self.violations.append(f"handle lacks {HANDLE_KEYS - params.keys()}")
        assert self._session is not None
        if self.reads_fail and self.role == "prefill":
            raise EngineFailure("KV load failure")
        host = params["remote_host"]
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{params['remote_port']}/fake/read"
        try:
            async with self._session.post(url, json=params) as answer:
                if answer.status != 200:
                    raise EngineFailure("KV load failure")
                self.reads += 1
                return str((await answer.json())["tokens"])
        except aiohttp.ClientError as error:
            raise EngineFailure("KV load failure") from error

    async def _serve_blocks(self, request: web.Request) -> web.Response:
        params = await request.json()
        blocks = self.blocks.get(params["remote_request_id"])
        wrong = None
        if params["remote_engine_id"] not in self._rank_ids():
            return web.Response(status=409)  # A real handshake refuses this too.
        if blocks is None:
            wrong = "unknown handle"
        elif blocks.reads:
            wrong = "handle used twice"
        elif blocks.params != params:
            wrong = "handle was altered"
        elif blocks.released:
            wrong = "handle was released"
        elif time.perf_counter() > blocks.deadline:
            wrong = "handle has expired"
        if wrong or blocks is None:
            self.violations.append(str(wrong))
            return web.Response(status=409)
        blocks.reads += 1
        return web.json_response({"tokens": blocks.tokens})

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompt: str,
        tokens_read: int,
        reuse: str | None,
        fault: Any,
    ) -> web.StreamResponse:
        script = self.scripts.popleft() if self.scripts and self.role == "decode" else Script()
        if script.content is None and not script.tool_calls:
            script.content = f"answer-{digest(prompt)[:8]}"
        if self.role == "prefill":
            script.content, script.finish_reason = script.content[:1], "length"  # type: ignore[index]
        params = self._keep(body, prompt, script, tokens_read, reuse)
        usage = {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + len(generated(script)),
            "completion_tokens": len(generated(script)),
            "prompt_tokens_details": {"cached_tokens": tokens_read}
            if self.report_usage_details
            else None,
        }
        if body.get("stream"):
            return await self._stream(request, body, script, params, usage, fault)
        return web.Response(
            body=dumps(whole_answer(self, body, script, params, usage)),
            headers={"Content-Type": "application/json"},
        )

    def _keep(
        self,
        body: dict[str, Any],
        prompt: str,
        script: Script,
        tokens_read: int,
        reuse: str | None,
    ) -> dict[str, Any] | None:
        """Pin this request's blocks and describe them."""
        prefill = self.role == "prefill"
        self.cached.append(prompt + generated(script))
        if self.omit_handles or not body.get("kv_transfer_params"):
            return None
        if not prefill and not self.bidirectional:
            return None
        # The last token has been sampled, not computed.
        tokens = prompt if prefill else (prompt + generated(script))[:-1]
        deadline = time.perf_counter() + self.ttl
        params: dict[str, Any] = {
            "do_remote_prefill": prefill,
            "do_remote_decode": not prefill,
            "remote_block_ids": [list(range(1, 2 + len(tokens) // BLOCK))],
            "remote_engine_id": self._rank_ids()[next(self._turns) % self.ranks],
            "remote_request_id": f"chatcmpl-{uuid.uuid4().hex}",
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(tokens),
            "remote_blocks_expiry_time": None if prefill else deadline,
            "transfer_mode": "pull",
        }
        if not prefill and not self.stock:
            params["pd_tokens"] = proof_of(tokens)
        self.blocks[params["remote_request_id"]] = Blocks(tokens, dict(params), deadline)
        self.handles.append(params)
        if prefill and not self.stock:
            return {**params, "pd_reuse": {"outcome": reuse, "tokens_read": tokens_read}}
        return params

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        script: Script,
        params: dict[str, Any] | None,
        usage: dict[str, Any],
        fault: Any,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events = stream_events(self, body, script, params, usage)
        for number, event in enumerate(events):
            if number == self.hold_after:
                self.held += 1
                while not self.released.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            if self.trickle and not self.released.is_set():
                await asyncio.sleep(0.02)
            if fault == "die" and number == 2:
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(3600)
            if fault == "stall" and number == 2:
                await asyncio.sleep(3600)
            if fault == "end" and number == 2:
                return response
            if fault == "error" and number == 2:
                error = {"error": {"message": "Internal server error", "code": 500}}
                await response.write(b"data: " + dumps(error) + b"\n\ndata: [DONE]\n\n")
                return response
            size = self.write_size or len(event)
            for start in range(0, len(event), size):
                await response.write(event[start : start + size])
                if self.write_size:
                    await asyncio.sleep(0)
        return response

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.tokenizer:
            return web.Response(status=404)
        self.tokenized.append(body)
        tokens = [ord(char) for char in render(body)]
        counts = {"count": len(tokens), "max_model_len": 8192}
        return web.json_response({**counts, "tokens": tokens, "token_strs": None})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.looked_at += 1
        return web.Response(text=f"# fake\nprocess_start_time_seconds {self.started}\n")

    async def _leases(self, request: web.Request) -> web.Response:
        self.lease_posts += 1
        if not self.leases:
            return web.Response(status=404)
        if self.lease_faults:
            self.lease_faults -= 1
            return web.Response(status=503)
        if self.lease_silence:
            await asyncio.sleep(3600)
        body = await request.json()
        for turn in body.get("release", ()):
            self._release(turn)
        renewed = {}
        for turn, seconds in body.get("renew", {}).items():
            blocks = self.blocks.get(turn)
            if blocks and not (blocks.released or blocks.reads):
                blocks.deadline = max(blocks.deadline, time.perf_counter() + seconds)
                renewed[turn] = seconds
                self.renewals.append(turn)
        return web.json_response({"released": body.get("release", []), "renewed": renewed})

    def _release(self, turn: str) -> None:
        self.released_turns.append(turn)
        if (blocks := self.blocks.get(turn)) is not None:
            blocks.released = True

    def _tell_released(self, params: dict[str, Any]) -> None:
        """A prefill that will not read says so to decode; that takes another path than ours."""

    def _prefix_cached(self, prompt: str) -> int:
        """Tokens of the prompt that a prefix cache has, whole blocks."""
        ends = range(BLOCK, len(prompt), BLOCK)
        return max((e for e in ends if any(t[:e] == prompt[:e] for t in self.cached)), default=0)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [model]})

    async def _other(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/pd/"):
            return web.Response(status=404)
        raw = await request.read()
        body = json.loads(raw) if raw else None
        asked = {"method": request.method, "path": request.path, "query": request.query_string}
        self.others.append({**asked, "headers": dict(request.headers), "body": body})
        fault = self.faults.popleft() if self.faults else None
        try:
            if (answer := await self._fail(request, body or {}, fault)) is not None:
                return answer
            events = other_events(self, request.path)
            if events and body and body.get("stream"):
                return await self._stream_others(request, events, fault)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        if body and body.get("encoding_format") == "bytes":
            metadata = {"Content-Type": "application/octet-stream", "metadata": '{"n":1}'}
            return web.Response(body=b"\x00\x01\xff", headers=metadata)
        return web.Response(
            body=dumps(other_answer(self, request.path, body)),
            headers={"Content-Type": "application/json"},
        )

    async def _stream_others(
        self, request: web.Request, events: list[bytes], fault: Any
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(events):
            if number == self.hold_after:
                self.held += 1
                while not self.released.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            if fault == "end" and number == 1:
                return response
            size = self.write_size or len(event)
            for start in range(0, len(event), size):
                await response.write(event[start : start + size])
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)


class EngineFailure(Exception):
    """The request fails inside the engine: HTTP 500."""


def proof_of(tokens: str) -> dict[str, Any]:
    """Which tokens blocks hold: a digest of all, and one of every whole block and all before."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return {
        "v": 2,
        "n": len(tokens),
        "b": BLOCK,
        "d": "".join(digest(tokens[:end])[:12] for end in ends),
        "e": digest(tokens),
    }


def tokens_proven(proof: dict[str, Any], prompt: str) -> int:
    if digest(prompt[: proof["n"]]) == proof["e"]:
        return int(proof["n"])
    proven = 0
    while digest(prompt[: proven + BLOCK])[:12] == proof["d"][proven // BLOCK * 12 :][:12]:
        proven += BLOCK
    return proven


def digest(tokens: str) -> str:
    return hashlib.sha256(tokens.encode(errors="surrogatepass")).hexdigest()


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def render(body: dict[str, Any]) -> str:
    """The prompt as text, one token a character.

    Reasoning of earlier turns is dropped, as thinking models' templates do.
    """
    if "messages" not in body:
        prompt = body["prompt"]
        if isinstance(prompt, list):
            prompt = "\x00".join(map(str, prompt))
        return str(prompt)
    text = "".join(f"<tool {json.dumps(tool)}>" for tool in body.get("tools") or [])
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "<image>") for part in content)
        calls = message.get("tool_calls") or []
        text += f"<{message['role']}>{content}{render_calls(calls)}</>"
    return text + "<assistant>"


def render_calls(calls: list[dict[str, Any]]) -> str:
    return "".join(f"!{c['function']['name']}{c['function']['arguments']}" for c in calls)


def generated(script: Script) -> str:
    """The tokens that decode made."""
    if script.generated is not None:
        return script.generated
    thoughts = f"<think>{script.reasoning}</think>" if script.reasoning else ""
    return thoughts + (script.content or "") + render_calls(script.tool_calls)


def whole_answer(
    engine: FakeEngine,
    body: dict[str, Any],
    script: Script,
    params: dict[str, Any] | None,
    usage: dict[str, Any],
) -> dict[str, Any]:
    chat = "messages" in body
    choices = []
    for index in range(body.get("n") or 1):
        choice: dict[str, Any] = {"index": index, "logprobs": None}
        choice |= {"finish_reason": script.finish_reason, "stop_reason": script.stop_reason}
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": script.content}
            message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
            if script.tool_calls:
                message["tool_calls"] = script.tool_calls
            message["reasoning"] = script.reasoning
            choice["message"] = message
        else:
            choice["text"] = script.content
        wants = body.get("return_token_ids")
        choice["token_ids"] = [ord(char) for char in generated(script)] if wants else None
        if not chat:
            choice["prompt_token_ids"] = [*map(ord, render(body))] if wants else None
        choices.append(choice)
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": engine.model,
        "choices": choices,
        "usage": usage,
        "kv_transfer_params": params,
        "ec_transfer_params": None,
    }
    if chat and body.get("return_token_ids"):
        answer["prompt_token_ids"] = engine.says_ids or [*map(ord, render(body))]
    return answer


def stream_events(
    engine: FakeEngine,
    body: dict[str, Any],
    script: Script,
    params: dict[str, Any] | None,
    usage: dict[str, Any],
) -> list[bytes]:
    """The answer's events as vLLM sends them, the handle on the last choice's last chunk."""
    chat = "messages" in body
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": engine.model,
    }
    deltas: list[dict[str, Any]] = []
    if chat:
        deltas.append({"role": "assistant", "content": ""})
        deltas += [{"reasoning": piece} for piece in pieces(script.reasoning)]
        deltas += [{"content": piece} for piece in pieces(script.content, script.piece)]
        for index, call in enumerate(script.tool_calls):
            function = call["function"]
            first = {"name": function["name"], "arguments": ""}
            deltas.append({"tool_calls": [{**call, "index": index, "function": first}]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
                for piece in pieces(function["arguments"])
            ]
    else:
        deltas += [{"text": piece} for piece in pieces(script.content)]
    several, wants_ids = body.get("n") or 1, bool(body.get("return_token_ids"))
    ids = [ord(char) for char in generated(script)] if wants_ids else []
    events = []
    for index in range(several):
        for number, delta in enumerate(deltas):
            last = number == len(deltas) - 1
            choice: dict[str, Any] = {"index": index}
            choice |= {"delta": delta} if chat else delta
            choice |= {"logprobs": None, "finish_reason": script.finish_reason if last else None}
            if last or not chat:
                choice["stop_reason"] = script.stop_reason if last else None
            if number or not chat:
                share = len(ids) if last else min(3, len(ids))
                choice["token_ids"], ids = (ids[:share] if wants_ids else None), ids[share:]
            prompt_ids = [*map(ord, render(body))] if wants_ids and not number else None
            if not chat:
                choice["prompt_token_ids"] = prompt_ids
            chunk: dict[str, Any] = {**head, "choices": [choice]}
            if chat and prompt_ids is not None:
                chunk["prompt_token_ids"] = prompt_ids
            if last and params is not None and index == several - 1:
                chunk["kv_transfer_params"] = params
            events.append(b"data: " + dumps(chunk) + b"\n\n")
    events.insert(1, b": keep-alive\n\n")
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(b"data: " + dumps({**head, "choices": [], "usage": usage}) + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


def other_handle(engine: FakeEngine) -> dict[str, Any]:
    """A handle as the engine adds it to answers that are no turns of the router."""
    return {
        "do_remote_decode": True,
        "remote_engine_id": engine.engine_id,
        "remote_host": engine.host,
        "remote_port": engine.port,
        "remote_block_ids": [[1]],
    }


def other_answer(engine: FakeEngine, path: str, body: Any) -> dict[str, Any]:
    """vLLM's shapes (openai/responses/protocol.py, anthropic/protocol.py), and an echo."""
    if path.startswith("/v1/responses"):
        name = path.split("/")[3] if path.count("/") > 2 else f"resp_{engine.role}_{engine.port}"
        return {"id": name, "object": "response", "kv_transfer_params": other_handle(engine)}
    if path == "/v1/messages":
        text = [{"type": "text", "text": "Hi"}]
        return {"type": "message", "content": text, "kv_transfer_params": other_handle(engine)}
    return {"path": path, "role": engine.role, "got": body, "score": 1.0}


def other_events(engine: FakeEngine, path: str) -> list[bytes]:
    def event(name: str, **fields: Any) -> bytes:
        return f"event: {name}\ndata: ".encode() + dumps({"type": name, **fields}) + b"\n\n"

    if path == "/v1/responses":
        between = dict.fromkeys(("kv_transfer_params", "ec_transfer_params"))
        name = f"resp_{engine.role}_{engine.port}"
        response = {"id": name, "status": "in_progress", **between}
        done = {**response, "status": "completed", "kv_transfer_params": other_handle(engine)}
        return [
            event("response.created", response=response),
            event("response.output_text.delta", delta="Grüße"),
            event("response.completed", response=done),
        ]
    if path == "/v1/messages":
        return [
            event("message_start", message={"role": "assistant"}),
            event("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hi"}),
            event("message_delta", delta={"stop_reason": "end_turn"}),
            event("message_stop"),
        ]
    return []


def pieces(text: str | None, size: int = 3) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)] if text else []


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "FakeError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def _anthropic_error(status: int, message: str) -> web.Response:
    error = {"type": "FakeError", "message": message}
    return web.json_response({"type": "error", "error": error}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ttl", type=float, default=480)
    parser.add_argument("--stock", action="store_true", help="no pd_connector")
    args = parser.parse_args()
    engine = FakeEngine(args.role, ttl=args.ttl, stock=args.stock)
    engine.start(args.port)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        engine.stop()


if __name__ == "__main__":
    main()
