"""vLLM plugin: ``--load-format pd_random``, random weights for a model that exists as a shape only.

vLLM's own dummy weights are so small that an answer hardly depends on the prompt: a wrong KV block
would not show. These are drawn so that attention picks few tokens and every layer adds its part;
both legs draw the same, parameter by parameter, from the parameter's name.
"""

import math
import zlib
from typing import Any

LOAD_FORMAT = "pd_random"
SHARPNESS = 2.0
"""Standard deviation of attention logits. At 1 an answer hardly depends on single tokens of a long
prompt. At 4 rounding in bfloat16 decides over 64 layers: 18 % of the first tokens are those of
float32, against 95 % at 2, where none survives wrong KV for half the prompt (simulated with a
narrow model of 64 layers and 640 tokens)."""


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once."""
    from vllm.model_executor import model_loader  # noqa: PLC0415

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(LOAD_FORMAT)(_loader())


def _loader() -> Any:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: PLC0415

    class RandomWeightsLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            parameters = dict(model.named_parameters())
            has_qk_norm = any(name.endswith("q_norm.weight") for name in parameters)
            for name, parameter in parameters.items():
                fill(name, parameter.data, has_qk_norm)

    return RandomWeightsLoader


def fill(name: str, tensor: Any, has_qk_norm: bool) -> None:
    """Draw one parameter."""
    import torch  # noqa: PLC0415

    if tensor.dim() < 2:
        bias = name.endswith("bias")
        tensor.fill_(0.0 if bias else SHARPNESS if name.endswith("q_norm.weight") else 1.0)
        return
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(zlib.crc32(name.encode()))
    spread = 1.0 if "embed" in name else 1.0 / math.sqrt(tensor.shape[-1])
    if "qkv_proj" in name and not has_qk_norm:
        spread *= math.sqrt(SHARPNESS)
    tensor.normal_(0.0, spread, generator=generator)
