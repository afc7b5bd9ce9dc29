"""A turn's request body: what the client sent, and what each leg gets of it."""

import re
from typing import Any

from pd_connector import contract
from pd_router import jsonbytes
from pd_router.errors import bad_request
from pd_router.history import Endpoint, is_token_ids

# Fields of kv_transfer_params that ask prefill to keep its blocks for decode.
FRESH_PREFILL = jsonbytes.dump(
    {
        contract.DO_REMOTE_DECODE: True,
        contract.DO_REMOTE_PREFILL: False,
        contract.REMOTE_ENGINE_ID: None,
        contract.REMOTE_BLOCK_IDS: None,
        contract.REMOTE_HOST: None,
        contract.REMOTE_PORT: None,
    }
)

FRESH_APPEND = {contract.DO_REMOTE_DECODE: False, contract.DO_REMOTE_PREFILL: False}
"""``kv_transfer_params`` that ask decode to keep the blocks of a request it does alone. Only the
pdctl connector then also frees them at their deadline."""

# Engine-to-engine fields that no client may set. vLLM merges vllm_xargs into the same place.
_ENGINE_FIELDS = (contract.KV_TRANSFER_PARAMS, "ec_transfer_params")
_XARGS = "vllm_xargs"

REQUEST_ID_HEADER = "X-Request-Id"
_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Fields about the answer alone. Prefill answers with one token that nobody reads, and some
# of these are refused without streaming or beside max_tokens 1.
_ANSWER_FIELD_NAMES = """
    stream stream_options stream_interval max_tokens max_completion_tokens min_tokens n best_of
    logprobs top_logprobs prompt_logprobs logprob_token_ids echo
    return_token_ids return_tokens_as_token_ids return_prompt_text
    stop include_stop_str_in_output structured_outputs thinking_token_budget
"""
_ANSWER_FIELDS = frozenset(_ANSWER_FIELD_NAMES.split())


def safe_request_id(text: Any) -> bool:
    """Whether an engine may take its request's id from this text.

    Decode renews the lease of prefill's blocks with a list of ids that prefill splits at
    commas (base_worker.py, _handle_heartbeat): an id with a comma in it would lose its blocks
    while it waits, and decode would read what others have put there since.
    """
    return isinstance(text, str) and _SAFE_REQUEST_ID.fullmatch(text) is not None


class TurnBody:
    """A request body that was read, checked and stripped.

    The part that both legs get is serialised once.
    """

    def __init__(self, endpoint: Endpoint, raw: bytes) -> None:
        """Raises :class:`~pd_router.errors.TurnError` (400) if ``raw`` is no turn."""
        self.fields = _read(endpoint, raw)
        self.conversation_id = self.fields.pop(contract.CONVERSATION_ID, None)
        if not safe_request_id(self.fields.get("request_id")):
            self.fields.pop("request_id", None)
        self.stripped = strip(self.fields)
        """How many engine-to-engine fields the client had set."""
        self._answer_only: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for name, value in self.fields.items():
            (self._answer_only if name in _ANSWER_FIELDS else shared)[name] = value
        self._shared = jsonbytes.dump(shared)[:-1]
        self.needs_decode_alone = self._needs_decode_alone()
        """Prefill and decode would not work on one and the same prompt."""

    def for_prefill(self, params: bytes, *, token_ids: bool = False) -> bytes:
        """The body for prefill; ``params`` is the ``kv_transfer_params`` JSON.

        ``token_ids``: prefill is asked for the prompt's ids.
        """
        own: dict[str, Any] = {"stream": False, "max_tokens": 1}
        if self._answer_only.get("max_completion_tokens") is not None:
            own["max_completion_tokens"] = 1
        if token_ids:
            own["return_token_ids"] = True
        field = b',"' + contract.KV_TRANSFER_PARAMS.encode() + b'":'
        return self._shared + b"," + jsonbytes.dump(own)[1:-1] + field + params + b"}"

    def for_decode(
        self, params: dict[str, Any] | None, *, token_ids: bool = False, usage: bool = False
    ) -> bytes:
        """The body for decode: the client's own, and ``kv_transfer_params``.

        ``token_ids``, ``usage``: decode is asked for the ids, and at a stream's end for the
        counts, also where the client did not ask.
        """
        own = dict(self._answer_only)
        if params is not None:
            own[contract.KV_TRANSFER_PARAMS] = params
        if token_ids:
            own["return_token_ids"] = True
        if usage and self.streams:
            own["stream_options"] = {**self._stream_options, "include_usage": True}
        return self._shared + (b"," + jsonbytes.dump(own)[1:] if own else b"}")

    @property
    def streams(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def wants_usage(self) -> bool:
        """The client gets a stream's counts."""
        return bool(self._stream_options.get("include_usage"))

    @property
    def wants_token_ids(self) -> bool:
        return bool(self.fields.get("return_token_ids"))

    @property
    def _stream_options(self) -> dict[str, Any]:
        options = self.fields.get("stream_options")
        return options if isinstance(options, dict) else {}

    def _needs_decode_alone(self) -> bool:
        """Every choice and every prompt of a request gets the same ``kv_transfer_params``, so
        that several would read blocks of another prompt, or blocks that the first read has
        freed. Beam search and embeddings drop the parameters, and ``prompt_logprobs`` need
        the prompt computed where they are asked for. ``truncate_prompt_tokens`` cuts by
        ``max_tokens``, which differs between the legs.
        """
        fields = self.fields
        alone = (
            fields.get("n") not in (None, 1)
            or fields.get("best_of") not in (None, 1)
            or bool(fields.get("use_beam_search"))
            or bool(fields.get("echo"))
            or fields.get("prompt_logprobs") is not None
            or fields.get("truncate_prompt_tokens") is not None
            or fields.get("prompt_embeds") is not None
        )
        prompt = fields.get("prompt")
        several = isinstance(prompt, list) and len(prompt) != 1 and not is_token_ids(prompt)
        return alone or several


def _read(endpoint: Endpoint, raw: bytes) -> dict[str, Any]:
    try:
        fields = jsonbytes.load(raw)
    except ValueError as error:
        raise bad_request("The request body is not valid JSON.") from error
    if not isinstance(fields, dict):
        raise bad_request("The request body must be a JSON object.")
    if endpoint == "chat" and not isinstance(fields.get("messages"), list):
        raise bad_request("'messages' is missing or not a list.")
    if endpoint == "completions" and not (fields.get("prompt") or fields.get("prompt_embeds")):
        raise bad_request("'prompt' is missing or empty.")
    return fields


def strip(fields: dict[str, Any]) -> int:
    """Remove what no client may set; says how many there were."""
    stripped = 0
    for name in _ENGINE_FIELDS:
        stripped += fields.pop(name, None) is not None
    xargs = fields.get(_XARGS)
    if isinstance(xargs, dict):
        stripped += sum(xargs.pop(name, None) is not None for name in _ENGINE_FIELDS)
    return stripped
