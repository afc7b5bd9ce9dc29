"""Log lines that more than one check reads. Wordings of several releases are matched as one."""

from pdctl.doctor.model import Pattern

TRANSFER_FAILURE = Pattern(
    "transfer-failure",
    (
        "NIXL transfer failure",
        "Handshake failed for request",
        "KVTransferError",
        "transfer failed for",
    ),
    r"(?:NIXL transfer failure: (?P<type>\w+)"
    r"|Handshake failed for request (?P<id>\S+)|nixl transfer failed|KVTransferError)"
    r"(?:.{0,400}?'engine_id': '(?P<own>[^']+)')?(?:.{0,400}?'remote_host': '(?P<host>[^']+)')?",
    timed=True,
)
ENGINE_ID_MISMATCH = Pattern(
    "engine-id-mismatch",
    ("engine ID mismatch", "engine id mismatch", "engine_id mismatch"),
    r"(?i)engine[ _]id mismatch\.?\s*Expected (?P<expected>[^\s,]+),\s*"
    r"received (?P<received>\S+?)\.?\s*$",
)
COMPATIBILITY = Pattern(
    "compatibility-hash",
    ("compatibility hash mismatch", "compatibility_hash mismatch", "compat hash mismatch"),
)
UNDECODABLE = Pattern(
    "handshake-undecodable",
    ("Failed to decode Nixl",),
    r"Failed to decode Nixl(?:HandshakePayload|AgentMetadata)",
)
EXPIRED_RELEASE = Pattern(
    "expired-release",
    ("Releasing expired KV blocks",),
    r"Releasing expired KV blocks for request (?P<request>\S+) "
    r"which were retrieved by (?P<readers>\d+) ",
    timed=True,
)
UNRECOGNISED_READ = Pattern(
    "unrecognised-read",
    ("for unrecognized request", "Unrecognized request"),
    r"(?:KV blocks for unrecognized request|Unrecognized request) (?P<request>\S+)",
)
DECLINED = Pattern(
    "declined-expired-read",
    ("Declining expired",),
    r"Declining expired (?:remote )?read for (?:request )?(?P<request>[^\s:;,]+)"
    r"(?: from engine (?P<engine>\S+?)\.?\s*$)?",
)
LOAD_FAILURE_FAILS = Pattern(
    "load-failure-fails",
    ("due to KV load failure",),
    r"Failing (?P<requests>\d+) request\(s\) due to KV load failure",
)
LOAD_FAILURE_RECOVERED = Pattern(
    "load-failure-recovered",
    ("Recovered from KV load failure",),
    r"Recovered from KV load failure: (?P<requests>\d+) request",
)
REMOTE_DISCONNECT = Pattern(
    "remote-disconnect",
    (
        "NIXL_ERR_REMOTE_DISCONNECT",
        "Work Request Flushed",
        "error handling callback was invoked",
        "Connection reset by remote peer",
    ),
    r"NIXL_ERR_REMOTE_DISCONNECT|UCX\s+ERROR.{0,400}Work Request Flushed"
    r"|error handling callback was invoked|UCX.{0,400}Connection reset by remote peer",
)
AGENT_UNKNOWN = Pattern(
    "agent-unknown",
    ("metadata for remote agent", "NIXL_ERR_NOT_FOUND", "could send the inter-agent"),
    r"metadata for remote agent '?[^']*'? ?not found|NIXL_ERR_NOT_FOUND"
    r"|no specified or potential backend could send",
)
BACKEND_ERROR = Pattern("nixl-backend-error", ("NIXL_ERR_BACKEND",))
BACKEND_CREATED = Pattern(
    "backend-instantiated",
    ("was instantiated",),
    r"Backend (?P<backend>[A-Z0-9_]+) was instantiated",
)
BACKEND_UNSUPPORTED = Pattern(
    "backend-unsupported",
    ("unsupported backend '", "getPluginParams: backend"),
    r"(?:unsupported backend|getPluginParams: backend) '(?P<backend>\w+)'",
)
ENGINE_DEAD = Pattern(
    "engine-dead",
    ("EngineDeadError", "EngineCore encountered a fatal error", "EngineCore encountered an issue"),
)
ADDRESS_IN_USE = Pattern(
    "address-in-use",
    ("ddress already in use", "EADDRINUSE"),
    r"(?i)address already in use(?:.{0,400}?addr=['\"]tcp://(?P<zmq>[^'\"]+)['\"])?",
)
OUT_OF_MEMORY_KILL = Pattern(
    "killed-for-memory",
    ("cgroup out of memory", "Out of memory: Killed", "OOMKilled", "oom-kill", "exit code 137"),
    r"(?i)out of memory: Killed process|OOMKilled|oom-kill|exit code 137",
)
KV_TRANSFER_METRICS = Pattern(
    "kv-transfer-metrics",
    ("KV Transfer metrics:",),
    r"Num successful transfers=(?P<transfers>\d+).{0,400}?Avg MB per transfer=(?P<mb>\d+(?:\.\d+)?)"
    r".{0,400}?Throughput \(MB/s\)=(?P<rate>\d+(?:\.\d+)?)"
    r"(?:.{0,400}?Avg number of descriptors=(?P<descriptors>\d+(?:\.\d+)?))?",
    counted=False,
)
