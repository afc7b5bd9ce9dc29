"""Writes the spec of a pair with one GPU per leg on one host.

usage: make_spec.py NAME MODEL_FOLDER PYTHON FILE [key=value...]

Keys: device (cuda or cpu), connector (pdctl or stock), vllm, load_format, port (the first of a
range), max_model_len.
"""

import json
import sys
from pathlib import Path


def spec(name: str, model: str, python: str, given: dict[str, str]) -> dict:
    cuda = given.get("device", "cuda") == "cuda"
    port = int(given.get("port", "8000"))
    common_args = [
        "--load-format",
        given.get("load_format", "pd_random"),
        "--max-num-batched-tokens",
        "8192",
        "--disable-uvicorn-access-log",
        "--no-enable-log-requests",
    ]
    legs = {}
    for number, role in enumerate(("prefill", "decode")):
        legs[role] = {
            "max_num_seqs": 8,
            "env": {"CUDA_VISIBLE_DEVICES": str(number)}
            if cuda
            else {"VLLM_CPU_OMP_THREADS_BIND": str(number)},
            "legs": [
                {
                    "host": "127.0.0.1",
                    "port": port + 100 * (number + 1),
                    "side_channel_port": port + 1000 + 100 * number,
                }
            ],
        }
        if cuda:
            legs[role]["gpu_memory_utilization"] = 0.9
        else:
            legs[role] |= {"enforce_eager": True, "cpus": str(number)}
    return {
        "name": name,
        "model": {
            "id": model,
            "served_name": name,
            "dtype": "bfloat16",
            "max_model_len": int(given.get("max_model_len", "32768")),
        },
        "engine": {
            "device": "cuda" if cuda else "cpu",
            "vllm": given.get("vllm", "0.26.0"),
            "python": python,
            "env": {
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            },
            "extra_args": {"all": common_args},
        },
        "kv_transfer": {
            "connector": given.get("connector", "pdctl"),
            "backend": "UCX",
            "bidirectional": True,
            "recompute_threshold": 64,
            # Turns follow each other at once; pinned blocks must not fill decode's memory.
            "decode_ttl": "20s",
            "block_size": 128,
            "cross_layer_blocks": "auto",
        },
        **legs,
        "router": {"port": port, "handle_ttl": "14s"},
    }


def main() -> None:
    name, model, python, file, *rest = sys.argv[1:]
    given = dict(each.split("=", 1) for each in rest)
    # JSON is YAML.
    Path(file).write_text(json.dumps(spec(name, model, python, given), indent=2) + "\n")
    print(f"{file}: {name}")


if __name__ == "__main__":
    main()
