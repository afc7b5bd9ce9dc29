"""Names shared by the connector, the router and the toolkit, each written once.

Imports nothing of vLLM, the router or the toolkit.

Sources: the ``kv_transfer_params`` fields are those that vLLM's NIXL connector
produces and reads (``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py``);
the ``vllm:`` metric names are those of vLLM's ``/metrics``.
"""

from enum import Enum


class Outcome(str, Enum):
    """What happened to the prompt of a turn on the prefill leg."""

    HIT = "hit"
    """Tokens were read back from the decode leg."""
    MISS = "miss"
    """There was no handle for this turn."""
    BELOW_THRESHOLD = "below_threshold"
    """Fewer reusable tokens than ``kv_recompute_threshold``: recomputed."""
    EXPIRED = "expired"
    """The decode leg's blocks had expired, or were about to."""
    HISTORY_CHANGED = "history_changed"
    """The prompt does not continue the turn that the handle came from."""
    FAILED = "failed"
    """The readback was tried and did not succeed; the prompt was recomputed."""
    DISABLED = "disabled"
    """Bidirectional transfer is off on this leg or in this deployment."""
    LOCAL_HIT = "local_hit"
    """The prompt's history was in the leg's own prefix cache; nothing was read."""


class Route(str, Enum):
    """How a turn's prompt gets its KV."""

    RECOMPUTE = "recompute"
    """Prefill computes all of it."""
    READBACK = "readback"
    """Prefill reads decode's blocks and computes the rest."""
    APPEND = "append"
    """Decode alone: its prefix cache holds the history."""


# Request and answer body fields.
KV_TRANSFER_PARAMS = "kv_transfer_params"
CONVERSATION_ID = "conversation_id"

# Fields of a handle (kv_transfer_params as an engine returns them).
DO_REMOTE_PREFILL = "do_remote_prefill"
DO_REMOTE_DECODE = "do_remote_decode"
REMOTE_BLOCK_IDS = "remote_block_ids"
REMOTE_ENGINE_ID = "remote_engine_id"
REMOTE_REQUEST_ID = "remote_request_id"
REMOTE_HOST = "remote_host"
REMOTE_PORT = "remote_port"
REMOTE_NUM_TOKENS = "remote_num_tokens"
REMOTE_EXPIRY = "remote_blocks_expiry_time"
"""When decode frees the blocks, in seconds of the clock of decode's engine."""

READ_MARGIN_SECONDS = 5.0
"""vLLM's prefill declines blocks with less time left than this
(``_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`` in ``nixl/pull_worker.py``)."""
CLAIM_SECONDS = 30.0
"""How long decode keeps a claimed turn for its reader; a read that takes longer is recomputed."""

# Fields that pd_connector adds to a handle; stock vLLM ignores unknown keys.
PD_TOKENS = "pd_tokens"
"""``{"v": 2, "n": tokens, "b": block size, "g": tokens per digest, "d": digests, "e": digest}``:
which tokens the handle's blocks hold (:mod:`pd_connector.proof`). Prefill compares them with its
prompt, decode with its own."""
PD_REUSE = "pd_reuse"
"""On prefill's handle: ``{"outcome": Outcome, "tokens_read": tokens, "reason": text,
"read_ms": milliseconds, "read_bytes": bytes}`` of the prompt; the last three may be missing."""
PD_LEASE = "pd_lease"
"""On decode's handle: ``{"v": 1}``. Decode knows claims: prefill asks it before it reads (see
docs/engine-http.md), and decode's answer counts, not ``remote_blocks_expiry_time``."""
PD_PREVIOUS = "pd_previous"
"""In the kv_transfer_params of a decode request: ``remote_request_id`` of the handle of the turn
before. Decode frees that turn once this one's blocks are kept. Prefill's answer carries it; for a
request that goes to decode alone the router sets it."""
PD_SIGNATURE = "pd_sig"
"""Signature of a handle by the leg that made it (:mod:`pd_connector.signature`)."""
# HTTP paths that pd_connector adds to an engine; JSON, with a bearer token where it says so.
ENGINE_SETTINGS_PATH = "/pd/settings"
"""GET: the effective settings of the leg, read only (also tells provider and rails)."""
ENGINE_LEASES_PATH = "/pd/leases"
"""GET: the finished turns whose blocks decode keeps. POST ``{"release": [ids], "renew": {id:
seconds}}``, ids being ``remote_request_id`` of handles: frees turns now, or lets them live at
least so many seconds from now. Both need the deployment's key (:data:`LEASE_KEY_HEADER`); unknown
ids are named in the answer and otherwise ignored. docs/engine-http.md has the answers."""
LEASE_KEY_HEADER = "X-PD-Key"
"""Proves to an engine that the router belongs to its deployment: the hex digits of
HMAC-SHA256(secret, :data:`LEASE_KEY_INPUT`). Without a secret the engine answers loopback only."""
LEASE_KEY_INPUT = b"leases"
SECRET_FILE_VARIABLE = "PD_SECRET_FILE"
"""Environment variable of engines and router: the file that holds the deployment's secret."""

# Request headers that name a conversation, first match wins (after the body field).
CONVERSATION_HEADERS = ("X-Conversation-ID", "X-Session-ID", "X-Correlation-ID")

# Response headers of the router: facts about the turn, never a handle.
HEADER_REUSE = "X-PD-Reuse"
"""The turn's :class:`Outcome`."""
HEADER_TOKENS_READ = "X-PD-Tokens-Read"
"""Prompt tokens read back from the decode leg."""
HEADER_PROMPT_TOKENS = "X-PD-Prompt-Tokens"
"""Prompt tokens of the turn, as the prefill leg counted them."""
HEADER_PREFILL_MS = "X-PD-Prefill-Ms"
"""Milliseconds from sending the prefill request to its answer, retries included."""

HEADER_ROUTE = "X-PD-Route"
"""The turn's :class:`Route`. In a request: ``recompute`` or ``readback`` pins it for this turn."""
HEADER_READ_MS = "X-PD-Read-Ms"
"""Milliseconds of the D->P read, when the engine tells them."""
HEADER_READ_BYTES = "X-PD-Read-Bytes"
"""Bytes of the D->P read, when the engine tells them."""

# Paths of the router besides the OpenAI API.
ADMIN_PATH = "/admin"
"""``/admin/conversations``, ``/admin/legs``: loopback or an admin token."""

# vLLM's own metrics, as they appear on an engine's /metrics.
ENGINE_PROMPT_TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SOURCE_LOCAL_COMPUTE = "local_compute"
SOURCE_LOCAL_CACHE = "local_cache_hit"
SOURCE_EXTERNAL_KV = "external_kv_transfer"
ENGINE_NIXL_BYTES = "vllm:nixl_bytes_transferred_sum"
ENGINE_NIXL_TRANSFERS = "vllm:nixl_bytes_transferred_count"
ENGINE_NIXL_EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
ENGINE_NIXL_FAILED = "vllm:nixl_num_failed_transfers_total"
ENGINE_KV_USAGE = "vllm:kv_cache_usage_perc"
ENGINE_RUNNING = "vllm:num_requests_running"
ENGINE_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
ENGINE_PREEMPTIONS = "vllm:num_preemptions_total"
ENGINE_QUEUE_SECONDS = "vllm:request_queue_time_seconds"
ENGINE_GENERATION_TOKENS = "vllm:generation_tokens_total"

HIGH_WATER_KEY = "pd_pinned_high_water"
"""In kv_connector_extra_config: the share of the KV cache in use above which decode lets finished
turns go."""
ENGINE_NIXL_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
ENGINE_NIXL_POST_SECONDS = "vllm:nixl_post_time_seconds_sum"
ENGINE_NIXL_DESCRIPTORS = "vllm:nixl_num_descriptors_sum"
ENGINE_TTFT_SECONDS = "vllm:time_to_first_token_seconds_sum"
ENGINE_REQUEST_SECONDS = "vllm:e2e_request_latency_seconds_sum"
ENGINE_CACHE_INFO = "vllm:cache_config_info"
"""Its labels hold ``block_size`` (tokens) and ``num_gpu_blocks``."""

OTLP_TRACES_PATH = "/v1/traces"
"""Where a collector takes spans over HTTP. Source: the OpenTelemetry protocol's specification."""


def otlp_http_url(endpoint: str) -> str:
    """The URL that spans are posted to; ``endpoint`` has the path already or not."""
    base = endpoint.rstrip("/")
    return base if base.endswith(OTLP_TRACES_PATH) else base + OTLP_TRACES_PATH


# How the plugin and the connector are named to vLLM.
PLUGIN_NAME = "pd_connector"
CONNECTOR_CLASS = "NixlConnector"
"""vLLM's own name, because vLLM tests for it (``has_connector`` in ``config/vllm.py``); the module
path beside it takes priority over vLLM's class of that name."""
CONNECTOR_MODULE = "pd_connector.connector"

# Lines in an engine's log that tell what of pd_connector is at work there.
LOG_STREAM_ACTIVE = "pd_connector: streamed answers carry kv_transfer_params"
"""Once per API server process of a disaggregated engine."""
LOG_STREAM_INACTIVE = "pd_connector: streamed answers do not carry kv_transfer_params"
"""Followed by ``: <reason>``; vLLM is left unpatched."""
LOG_CHECKS_INACTIVE = "pd_connector: kv_transfer_params of requests are not checked"
"""Followed by ``: <reason>``."""
LOG_CONNECTOR_ACTIVE = "pd_connector: connector active"
"""Followed by ``: role=... bidirectional=... kv_recompute_threshold=... (tokens)
decoder_kv_blocks_ttl=... (seconds) kv_load_failure_policy=... readback=on|off signed=on|off
backends=... block_size=... pdctl=... vllm=... nixl=...``, once per engine core."""
LOG_SETTINGS = "pd_connector: effective settings"
"""Followed by ``: <JSON>``, what :data:`ENGINE_SETTINGS_PATH` answers; once per API server process
of a disaggregated engine."""
LOG_READBACK_UNSUPPORTED = "pd_connector: readback is off on this leg"
"""Followed by ``: <reason>``; every prompt is recomputed with outcome ``disabled``."""
