"""What one spec file says. ``examples/`` holds the commented reference.

Field descriptions are the JSON Schema's (``pdctl schema``).
"""

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)

from pdctl.spec.units import GIB, Duration, Size

MOST = 10**9
"""No count in a spec is larger."""

NAME = r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
HOST = (
    r"^(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?"
    r"|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]{0,34}:[0-9A-Fa-f:.]{0,34})$"
)
CACHE_DTYPE = r"^[a-z0-9_]+$"
PROVIDER = r"^[a-z0-9_;-]+$"
HEADER = r"^[A-Za-z0-9-]+$"
URL = r"^https?://[!-~]+$"
STATE = r"^(memory|rediss?://[!-~]+)$"
CPUS = r"^[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*$"
FORMS = {
    NAME: "lower-case letters, digits and '-' (at most 63, no '-' first or last)",
    VARIABLE: "a variable's name (letters, digits and '_')",
    HOST: "a host name or IP address (without scheme, port or brackets)",
    CACHE_DTYPE: "a cache dtype such as auto or fp8_e4m3",
    PROVIDER: "a libfabric provider such as efa or tcp",
    HEADER: "a header's name (letters, digits and '-')",
    CPUS: "a list of cores such as 0-7,16-23, in quotes",
    URL: "an http:// or https:// URL",
    STATE: "memory or a redis:// URL",
}
"""What each pattern stands for, in messages."""


def _as_text(value: object) -> object:
    """A number or switch as YAML reads it; loading a file keeps the text as it stands there."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _address(text: str) -> str:
    if ":" in text or re.fullmatch(r"[0-9.]+", text):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            raise ValueError(f"{text!r} is not an IP address") from None
    return text


Text = Annotated[
    str,
    BeforeValidator(_as_text),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
"""Text as the file has it, also where YAML sees a number or a switch."""
Env = Annotated[
    dict[Annotated[str, Field(pattern=VARIABLE)], Text],
    Field(json_schema_extra={"additionalProperties": False}),
]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Host = Annotated[str, Field(pattern=HOST), AfterValidator(_address)]
Count = Annotated[int, Field(ge=1, le=MOST, strict=True)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Model(Section):
    id: str = Field(
        min_length=1,
        description="Hub id, or a folder when it starts with /, ./, ../ or ~ "
        "(relative to the spec file).",
    )
    served_name: str | None = Field(
        None, min_length=1, description="The name clients put into 'model'; the id when left out."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: Count = Field(description="Longest prompt plus answer, in tokens.")
    kv_cache_dtype: str = Field(
        "auto", pattern=CACHE_DTYPE, description="vLLM's --kv-cache-dtype, on every leg."
    )


class ExtraArgs(Section):
    all: list[Text] = Field(default_factory=list, description="For every engine leg.")
    prefill: list[Text] = Field(default_factory=list)
    decode: list[Text] = Field(default_factory=list)


class Engine(Section):
    device: Literal["cuda", "cpu"] = Field("cuda", description="What the engine runs on.")
    vllm: str = Field("0.29.0", description="vLLM's version on the nodes; flags depend on it.")
    nixl: str = Field("1.4.1", description="NIXL's version on the nodes.")
    venv: str | None = Field(
        None, min_length=1, description="Virtual environment that holds vLLM, on the nodes."
    )
    python: str | None = Field(
        None, min_length=1, description="Python interpreter that has vLLM, instead of 'venv'."
    )
    cpu_kv_cache: Size = Field(GIB, description="KV cache of one leg when device is cpu.")
    env: Env = Field(default_factory=dict, description="Environment of every engine leg.")
    extra_args: ExtraArgs = Field(
        default_factory=ExtraArgs, description="Further vLLM arguments, appended as they are."
    )


class KvTransfer(Section):
    connector: Literal["pdctl", "stock"] = Field(
        "pdctl",
        description="pdctl: vLLM's pull connector with proof of tokens and without its hangs. "
        "stock: vLLM's own.",
    )
    mode: Literal["pull", "push"] = Field("pull", description="push exists with stock only.")
    backend: Literal["LIBFABRIC", "UCX"] = "LIBFABRIC"
    buffer_device: Literal["cuda", "cpu"] | None = Field(
        None, description="Where transfer buffers live; the engine's device when left out."
    )
    bidirectional: bool = Field(True, description="Prefill reads decode's blocks back.")
    recompute_threshold: int = Field(
        64,
        ge=0,
        le=MOST,
        strict=True,
        description="Fewer reusable tokens than this are recomputed, not read.",
    )
    decode_ttl: Duration = Field(
        480.0,
        description="How long decode keeps a finished turn's blocks unless its lease is renewed.",
    )
    pinned_high_water: float = Field(
        0.8,
        gt=0,
        le=1,
        strict=True,
        description="Share of decode's KV cache in use above which finished turns let their blocks "
        "go, the longest idle first (pdctl connector).",
    )
    load_failure_policy: Literal["auto", "recompute", "fail"] = Field(
        "auto", description="auto: recompute with the pdctl connector, fail with stock."
    )
    secret_file: str | None = Field(
        None,
        min_length=1,
        description="File with the deployment's secret, the same on every node, with which legs "
        "sign their handles. Left out: pdctl up makes one, scripts sign nothing unless "
        "PD_SECRET_FILE is set.",
    )
    engine_id: str = Field(
        "{deployment}-{leg}-{nonce}",
        description="Pattern of engine ids: {deployment}, {role}, {leg}, and {nonce}, "
        "which is new at every start.",
    )
    block_size: Count | None = Field(
        128,
        description="Tokens per KV block; large blocks mean few descriptors per transfer. "
        "null leaves it to vLLM.",
    )
    cross_layer_blocks: Literal["auto", True, False] = Field(
        "auto",
        description="All layers of a block side by side, so that one descriptor moves them. "
        "auto: on where it was measured (CUDA, vLLM before 0.29).",
    )


class Fabric(Section):
    provider: str | None = Field(
        None,
        pattern=PROVIDER,
        description="libfabric provider (FI_PROVIDER), e.g. efa; null leaves FI_PROVIDER unset.",
    )
    interfaces: Count | None = Field(
        None, description="Fabric interfaces a node should have, e.g. 16."
    )
    env: Env = Field(default_factory=dict, description="FI_*, UCX_* and NIXL_* variables.")


class LegSettings(Section):
    tensor_parallel: int = Field(1, ge=1, le=1024, strict=True)
    data_parallel: int = Field(
        1, ge=1, le=1024, strict=True, description="Ranks; each takes a side-channel port."
    )
    max_model_len: Count | None = Field(None, description="Must be the same on all legs.")
    max_num_seqs: Count | None = None
    prefix_caching: bool | None = Field(
        None, description="Off on prefill and on on decode when left out, as in the article."
    )
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, strict=True)
    enforce_eager: bool = Field(False, description="No compilation and no CUDA graphs.")
    cpus: str | None = Field(
        None,
        pattern=CPUS,
        description="Cores that the leg's processes may use (taskset), e.g. 0-7,16-23.",
    )
    env: Env = Field(default_factory=dict)
    extra_args: list[Text] = Field(default_factory=list)


class Leg(LegSettings):
    """One engine process. What it leaves out, its role's section says."""

    host: Host = Field(description="Address the other legs reach it at.")
    bind: Host | None = Field(None, description="Address to listen on; host when left out.")
    port: Port = Field(description="HTTP port.")
    side_channel_host: Host | None = Field(
        None, description="NIXL handshake address; host when left out."
    )
    side_channel_port: Port = Field(
        5600, description="NIXL handshake port, the first of one per data-parallel rank."
    )
    engine_id: str | None = Field(None, min_length=1, description="Pattern for this leg alone.")

    @property
    def listen_host(self) -> str:
        """Address that its HTTP server listens on."""
        return self.bind or self.host

    @property
    def handshake_host(self) -> str:
        """Address of its side channel."""
        return self.side_channel_host or self.host


class Role(LegSettings):
    """Settings of all legs of a role, and the legs."""

    legs: list[Leg] = Field(min_length=1, max_length=512)


Rate = Annotated[float, Field(gt=0, le=1e6)]


class Rates(Section):
    """Milliseconds per token, for the choice of routes; null is learned from the turns."""

    prefill: Rate | None = Field(None, description="Computed by a prefill leg.")
    append: Rate | None = Field(None, description="Computed by a decode leg.")
    readback: Rate | None = Field(None, description="Read back, decode to prefill.")
    handover: Rate | None = Field(None, description="Moved prefill to decode.")


class Limits(Section):
    """What one client, or all together, may take of the router."""

    max_body: Size = Field(64 * 2**20, description="Largest request body.")
    max_header: Size = Field(
        16 * 2**10, ge=256, le=2**20, description="Largest header, and largest request line."
    )
    max_requests: Count = Field(
        4096, description="Requests in flight; more are answered with HTTP 503."
    )
    body_timeout: Duration = Field(60.0, description="How long a request's body may take.")
    client_stall_timeout: Duration = Field(
        120.0, description="How long a client may take nothing of an answer that waits for it."
    )


class Router(Section):
    host: Host = Field("127.0.0.1", description="Address to listen on.")
    port: Port = 8000
    handle_ttl: Duration = Field(
        450.0, description="How long a handle is kept; must stay below decode_ttl."
    )
    handle_max_age: Duration | None = Field(
        None,
        description="While a conversation pauses, its blocks are renewed on decode, up to this "
        "age; not renewed when left out. With the pdctl connector.",
    )
    readback_timeout: Duration = Field(
        60.0, description="Longest wait for a prefill that reads back, before it is recomputed."
    )
    conversation_headers: list[Annotated[str, Field(pattern=HEADER)]] = Field(
        default_factory=list,
        description="Further request headers that name a conversation.",
    )
    tenant_header: str | None = Field(
        None,
        pattern=HEADER,
        description="Request header that names the tenant; its Authorization when left out.",
    )
    reuse_proof: Literal["auto", "connector", "tokens", "messages", "off"] = Field(
        "auto",
        description="What shows that a prompt starts with the tokens decode holds. connector: "
        "the engine compares; tokens: the router compares token ids; messages: equal messages "
        "are trusted; off: no reuse; auto: connector with pdctl, tokens with stock.",
    )
    route: Literal["auto", "recompute", "readback", "append"] = Field(
        "auto",
        description="How a turn gets its KV: prefill computes all, prefill reads decode's "
        "blocks, or decode alone; auto: the fastest within the bounds below.",
    )
    append_max_tokens: int = Field(
        2048,
        ge=0,
        le=MOST,
        strict=True,
        description="Most tokens of a prompt that decode computes on the append route.",
    )
    max_decode_stall_ms: float = Field(
        200.0,
        ge=0,
        le=MOST,
        description="Longest time, in ms, that an append may take from running streams.",
    )
    rates: Rates = Field(default_factory=Rates)
    max_handles: Count = Field(100_000, description="Most handles that are held at once.")
    state: str = Field(
        "memory",
        pattern=STATE,
        description="Where handles are held: memory, or the redis:// URL of a Redis or Valkey "
        "that several routers share.",
    )
    native: bool = Field(
        True,
        description="The plain parts of streams are passed on by the router's native part, where "
        "it was built.",
    )
    api_keys_file: str | None = Field(
        None,
        min_length=1,
        description="File of the API keys that clients must send, one a line; read on the "
        "router's node.",
    )
    admin_token_file: str | None = Field(
        None,
        min_length=1,
        description="File of the token for /admin; without it /admin answers on loopback alone.",
    )
    tls_certificate: str | None = Field(
        None, min_length=1, description="PEM file of the router's certificate chain."
    )
    tls_key: str | None = Field(None, min_length=1, description="PEM file of its private key.")
    drain_timeout: Duration = Field(
        30.0, description="How long running requests may go on when the router is stopped."
    )
    limits: Limits = Field(default_factory=Limits)
    python: str | None = Field(
        None, min_length=1, description="Python that has pd_router; the engine's when left out."
    )


class Stack(Section):
    """What watches the deployment: Prometheus, Alertmanager, Grafana, Tempo, a collector."""

    host: Host = Field(
        "127.0.0.1", description="Where Prometheus and the others listen and are reached."
    )
    prometheus_port: Port = 9090
    alertmanager_port: Port = 9093
    grafana_port: Port = 3000
    scrape_interval: Duration = Field(15.0, description="Time between two looks at every leg.")
    alert_window: Duration = Field(
        300.0,
        description="Short window of the alert rules; the long one is twelve times as long.",
    )
    ttft_slo: Duration = Field(
        2.5, description="Time allowed to the first token; a bucket of the router's histogram."
    )
    ttft_target: float = Field(
        0.95,
        gt=0,
        lt=1,
        strict=True,
        description="Share of streamed turns that must keep ttft_slo.",
    )
    hit_traces: float = Field(
        0.05,
        ge=0,
        le=1,
        strict=True,
        description="Share of traces of undisturbed, read-back turns that the collector keeps.",
    )
    playbooks_url: str | None = Field(
        None,
        pattern=URL,
        description="Where the playbook pages are; Prometheus serves them when left out.",
    )
    alert_webhook: str | None = Field(
        None, pattern=URL, description="URL that Alertmanager posts alerts to."
    )


class Observability(Section):
    otlp_endpoint: str | None = Field(
        None,
        pattern=URL,
        description="OpenTelemetry collector for the spans of router and engines: "
        "http://HOST:4317 for grpc, http://HOST:4318 for http/protobuf (/v1/traces is added).",
    )
    otlp_protocol: Literal["grpc", "http/protobuf"] = Field(
        "grpc", description="How spans travel to it (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL)."
    )
    conversation_ids: bool = Field(
        False, description="Spans tell conversation ids in clear, not their hashes alone."
    )
    nixl_log_level: Literal["TRACE", "DEBUG", "INFO", "WARN", "ERROR"] | None = Field(
        None, description="NIXL_LOG_LEVEL; DEBUG shows the rails LIBFABRIC opens."
    )
    stack: Stack = Field(default_factory=Stack)


class Benchmark(Section):
    """The conversation that ``pdctl verify`` and ``pdctl demo`` hold."""

    turns: int = Field(4, ge=2, le=64, strict=True)
    first_turn_chars: Count = Field(
        3000, description="Characters of the first turn: instructions, tools, documents."
    )
    new_chars_per_turn: Count = Field(600, description="Characters of new text in later turns.")
    answer_tokens: Count = 32


class Workload(Section):
    """What is expected of clients; ``pdctl doctor`` sizes decode's pinned blocks with it."""

    conversations: Count | None = Field(
        None, description="Conversations in progress at once; sizing is not checked without it."
    )
    context_tokens: Count | None = Field(
        None, description="Tokens of a conversation; model.max_model_len when left out."
    )
    turn_gap: Duration = Field(
        30.0, description="Longest usual time between an answer and the next turn."
    )
    conversation_time: Duration = Field(
        600.0, description="How long a conversation goes on, from first to last turn."
    )


class Spec(Section):
    """One deployment."""

    name: str = Field(
        pattern=NAME,
        description="Lower-case letters, digits and '-'; deployments side by side differ in it.",
    )
    model: Model = Field(description="What is served.")
    engine: Engine = Field(default_factory=Engine)
    kv_transfer: KvTransfer = Field(default_factory=KvTransfer)
    fabric: Fabric = Field(default_factory=Fabric)
    prefill: Role = Field(description="The legs that compute prompts, and their settings.")
    decode: Role = Field(description="The legs that generate answers, and their settings.")
    router: Router = Field(default_factory=Router)
    observability: Observability = Field(default_factory=Observability)
    benchmark: Benchmark = Field(default_factory=Benchmark)
    workload: Workload = Field(default_factory=Workload)
