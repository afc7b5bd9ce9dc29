"""How many tokens decode's TTL pins, whether they fit, and which TTL does."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdctl.doctor.sizing import Load, shape_of, size
from tests.doctor.bundles import Bundle, unknown

QWEN3_32B = {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
             "head_dim": 128, "hidden_size": 5120, "torch_dtype": "bfloat16"}  # fmt: skip
DEEPSEEK_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
               "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "cache", "bytes_per_token"),
    [
        # 2 (K and V) * 64 layers * 8 heads * 128 * 2 bytes: 256 KiB.
        (QWEN3_32B, "auto", 262144),
        (QWEN3_32B, "fp8_e4m3", 131072),
        # One latent vector and its rotary part per layer.
        (DEEPSEEK_V3, "auto", 61 * 576 * 2),
        ({"text_config": QWEN3_32B}, "auto", 262144),
        ({**QWEN3_32B, "head_dim": None}, "auto", 2 * 64 * 8 * 80 * 2),
    ],
)
def test_bytes_per_token(config: dict[str, Any], cache: str, bytes_per_token: int) -> None:
    shape = shape_of(config, cache, "auto")
    assert shape is not None
    assert shape.bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": "many"},
        {**QWEN3_32B, "torch_dtype": "int3"},
        {**QWEN3_32B, "layer_types": ["linear_attention", "full_attention"]},
        {**QWEN3_32B, "mamba_d_state": 128},
    ],
)
def test_a_shape_that_is_not_known(config: dict[str, Any]) -> None:
    assert shape_of(config, "auto", "auto") is None


def test_a_longer_ttl_pins_more() -> None:
    # 10 conversations of 1000 tokens that go on for 100 s: 100 tokens end per second.
    load = Load(10, 1000, turn_gap=5, conversation_time=100)
    answer = size(load, ttl=50, capacity=20_000, legs=1)
    assert (answer.in_progress, answer.pinned, answer.needed) == (10_000, 5_000, 15_000)
    assert answer.fits
    assert answer.longest_ttl == 100
    assert not size(load, ttl=101, capacity=20_000, legs=1).fits
    assert size(load, ttl=1, capacity=9_000, legs=1).longest_ttl == 0
    assert size(load, ttl=50, capacity=20_000, legs=2).needed == 7_500


def metrics(blocks: int) -> str:
    return f'vllm:cache_config_info{{block_size="128",num_gpu_blocks="{blocks}"}} 1.0\n'


def sized(tmp_path: Path, blocks: int, **workload: Any) -> dict[str, Any]:
    bundle = Bundle(tmp_path).spec("p5en-qwen3-32b.yaml", workload=workload)
    bundle.add("decode-0/metrics.txt", metrics(blocks))
    bundle.add("deployment/model.json", json.dumps(QWEN3_32B))
    return bundle.doctor("--only", "PD7060")


def test_what_fits_is_told_as_information(tmp_path: Path) -> None:
    (finding,) = sized(tmp_path, 10_000, conversations=20, context_tokens=20_000)["findings"]
    assert finding["severity"] == "info"
    assert "of up to" in finding["cause"]
    # 400k tokens in progress, 320k pinned, at 256 KiB each.
    assert "720000 (175.8 GiB) of 1280000 tokens" in finding["evidence"][1]["excerpt"]


def test_a_ttl_that_fits_is_proposed(tmp_path: Path) -> None:
    (finding,) = sized(tmp_path, 5_000, conversations=20, context_tokens=20_000)["findings"]
    assert finding["severity"] == "warning"
    # (640k - 400k) tokens, 667 more each second.
    assert "decode_ttl to 360s" in finding["fix"]


def test_no_ttl_fits(tmp_path: Path) -> None:
    (finding,) = sized(tmp_path, 3_200, conversations=20, context_tokens=20_000)["findings"]
    assert "No TTL fits" in finding["cause"]


def test_without_the_expected_conversations_it_is_unknown(tmp_path: Path) -> None:
    report = sized(tmp_path, 3_200)
    assert report["findings"] == []
    assert unknown(report) == {"PD7060"}


def test_a_cpu_leg_is_sized_by_its_spec(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path).spec("laptop.yaml", workload={"conversations": 2})
    canary = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 64}
    bundle.add("deployment/model.json", json.dumps(canary)).add("decode-0/env.txt", "A=b\n")
    (finding,) = bundle.doctor("--only", "memory-sizing")["findings"]
    # 1 GiB at 2 * 4 * 2 * 64 * 4 bytes per token.
    assert "262144 tokens" in finding["evidence"][1]["excerpt"]
