"""What the article on bidirectional KV transfer reports, beside which a run is set.

Its machines: one prefill and one decode node, each an Amazon EC2 p5en.48xlarge (eight H200,
tensor parallel over eight), joined by EFA; prefix caching off on prefill; vLLM 0.29.0, NIXL 1.4.1
over LIBFABRIC. Milliseconds; means over a sweep of growing conversations.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Reported:
    """One pair of figures: without and with bidirectional transfer."""

    model: str
    quantity: Literal["ttft", "prefill"]
    tokens: int
    off_ms: float
    on_ms: float

    @property
    def ratio(self) -> float:
        return self.off_ms / self.on_ms


FIGURES = (
    Reported("Qwen3-32B", "ttft", 2048, 158, 122),
    Reported("Qwen3-32B", "ttft", 24576, 778, 460),
    Reported("Qwen3-32B", "prefill", 2048, 153, 128),
    Reported("Qwen3-32B", "prefill", 24576, 744, 414),
    Reported("GLM-5-FP8", "ttft", 2048, 500, 358),
    Reported("GLM-5-FP8", "ttft", 20480, 2334, 702),
    Reported("GLM-5-FP8", "prefill", 2048, 500, 316),
    Reported("GLM-5-FP8", "prefill", 20480, 2331, 541),
)

TRANSFER_MS = {"Qwen3-32B": (30, 130), "GLM-5-FP8": (29, 110)}
"""D->P read at the shortest and at the longest prompt."""

MACHINES = (
    "two p5en.48xlarge (8 x H200 each, tensor parallel 8) over EFA, vLLM 0.29.0, NIXL 1.4.1 with "
    "LIBFABRIC, prefill's prefix cache off"
)
