"""What a worker tells the scheduler of its NIXL READs."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

# The start script's part of an engine id: 6 random bytes (templates/engine.sh.j2).
_NONCE = re.compile(r"(?:^|[-_.:])[0-9a-f]{12}(?![0-9A-Za-z])")


class Transfer(NamedTuple):
    """One NIXL READ of one worker, ended."""

    request_id: str
    started: int
    """When it was posted, nanoseconds since 1970."""
    seconds: float
    """From posting to completion, as NIXL measured it; 0 for one that failed."""
    post_seconds: float
    bytes: int
    descriptors: int
    failed: bool = False


class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The READs that ended in a step, and requests whose READ was declined because the peer's
    blocks had expired or its claim had lapsed."""

    def __init__(self, expired: Iterable[str] = (), transfers: Iterable[Transfer] = ()) -> None:
        self.expired = set(expired)
        self.transfers = list(transfers)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        return WorkerReport(self.expired | other.expired, self.transfers + other.transfers)


def peer_name(engine_id: object) -> str:
    """An engine id without what is new at every start."""
    name = engine_id if isinstance(engine_id, str) else "unknown"
    return _NONCE.sub("", name, count=1).strip("-_.:") or name
