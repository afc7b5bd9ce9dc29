"""What one spec file says. ``examples/`` holds the commented reference.

Field descriptions are the JSON Schema's (``pdctl schema``).
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pdctl.spec.units import Duration, Size


def _env_value(value: object) -> object:
    """YAML reads ``1`` and ``on`` as int and bool; the environment only has text."""
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value) if isinstance(value, int | float) else value


EnvValue = Annotated[str, BeforeValidator(_env_value)]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Env = dict[EnvName, EnvValue]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,253}$")]
Argument = Annotated[str, BeforeValidator(_env_value)]
Tokens = Annotated[int, Field(strict=True)]


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
    max_model_len: Tokens = Field(gt=0, description="Longest prompt plus answer, in tokens.")
    kv_cache_dtype: str = Field(
        "auto", pattern=r"^[a-z0-9_]+$", description="vLLM's --kv-cache-dtype, on every leg."
    )


class ExtraArgs(Section):
    all: list[Argument] = Field(default_factory=list, description="For every engine leg.")
    prefill: list[Argument] = Field(default_factory=list)
    decode: list[Argument] = Field(default_factory=list)


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
    cpu_kv_cache: Size = Field(2**30, description="KV cache of one leg when device is cpu.")
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
    recompute_threshold: Tokens = Field(
        64, ge=0, description="Fewer reusable tokens than this are recomputed, not read."
    )
    decode_ttl: Duration = Field(
        480.0, description="How long decode keeps a finished turn's blocks (not renewed)."
    )
    load_failure_policy: Literal["auto", "recompute", "fail"] = Field(
        "auto", description="auto: recompute with the pdctl connector, fail with stock."
    )
    engine_id: str = Field(
        "{deployment}-{leg}-{nonce}",
        description="Pattern of engine ids: {deployment}, {role}, {leg}, and {nonce}, "
        "which is new at every start.",
    )
    block_size: Tokens | None = Field(
        128,
        gt=0,
        description="Tokens per KV block; large blocks mean few descriptors per transfer. "
        "null leaves it to vLLM.",
    )
    cross_layer_blocks: bool | Literal["auto"] = Field(
        "auto",
        description="All layers of a block side by side, so that one descriptor moves them. "
        "auto: on where it was measured (CUDA, vLLM before 0.29).",
    )


class Fabric(Section):
    provider: str | None = Field(
        None,
        pattern=r"^[a-z0-9_;-]+$",
        description="libfabric provider (FI_PROVIDER), e.g. efa; null leaves FI_PROVIDER unset.",
    )
    interfaces: int | None = Field(
        None, gt=0, strict=True, description="Fabric interfaces a node should have, e.g. 16."
    )
    env: Env = Field(default_factory=dict, description="FI_*, UCX_* and NIXL_* variables.")


class LegSettings(Section):
    tensor_parallel: int = Field(1, gt=0, le=1024, strict=True)
    data_parallel: int = Field(
        1, gt=0, le=1024, strict=True, description="Ranks; each takes a side-channel port."
    )
    max_model_len: Tokens | None = Field(None, gt=0, description="Must be the same on all legs.")
    max_num_seqs: int | None = Field(None, gt=0, strict=True)
    prefix_caching: bool | None = Field(
        None, description="Off on prefill and on on decode when left out, as in the article."
    )
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    enforce_eager: bool = Field(False, description="No compilation and no CUDA graphs.")
    env: Env = Field(default_factory=dict)
    extra_args: list[Argument] = Field(default_factory=list)


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
    engine_id: str | None = Field(None, description="Pattern for this leg alone.")


class Role(LegSettings):
    """Settings of all legs of a role, and the legs."""

    legs: list[Leg] = Field(min_length=1, max_length=512)


class Router(Section):
    host: Host = Field("127.0.0.1", description="Address to listen on.")
    port: Port = 8000
    handle_ttl: Duration = Field(
        450.0, description="How long a handle is kept; must stay below decode_ttl."
    )
    readback_timeout: Duration = Field(
        60.0, description="Longest wait for a prefill that reads back, before it is recomputed."
    )
    conversation_headers: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")]] = Field(
        default_factory=list,
        description="Further request headers that name a conversation.",
    )
    python: str | None = Field(
        None, min_length=1, description="Python that has pd_router; the engine's when left out."
    )


class Observability(Section):
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://\S+$",
        description="OpenTelemetry collector for the engines' own spans.",
    )
    nixl_log_level: Literal["TRACE", "DEBUG", "INFO", "WARN", "ERROR"] | None = Field(
        None, description="NIXL_LOG_LEVEL; DEBUG shows the rails LIBFABRIC opens."
    )


class Benchmark(Section):
    """The conversation that ``pdctl verify`` and ``pdctl demo`` hold."""

    turns: int = Field(4, ge=2, le=64, strict=True)
    new_chars_per_turn: int = Field(
        1000, gt=0, strict=True, description="Characters of new text in every turn."
    )
    answer_tokens: Tokens = Field(32, gt=0)


class Spec(Section):
    """One deployment."""

    name: str = Field(
        pattern=r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$",
        description="Lower-case letters, digits and '-'; deployments side by side differ in it.",
    )
    model: Model
    engine: Engine = Field(default_factory=Engine)
    kv_transfer: KvTransfer = Field(default_factory=KvTransfer)
    fabric: Fabric = Field(default_factory=Fabric)
    prefill: Role
    decode: Role
    router: Router = Field(default_factory=Router)
    observability: Observability = Field(default_factory=Observability)
    benchmark: Benchmark = Field(default_factory=Benchmark)
