"""Writes a model folder that has a shape and a tokenizer but no weights.

usage: make_model.py NAME FOLDER      (NAME: one of SHAPES)

The tokenizer knows single characters; the rest of the vocabulary are tokens with a text of their
own, so that whatever a random model says has one.
"""

import json
import sys
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]

SHAPES = {
    # Qwen/Qwen3-32B's config.json.
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    # mistralai/Mistral-Large-Instruct-2407 (123B) with 36 of its 88 layers, to fit one GPU.
    "mistral-large-36-layers": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 12288,
        "intermediate_size": 28672,
        "num_hidden_layers": 36,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    # For a dry run without a GPU, one of each architecture.
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
}
COMMON = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tokenizer(vocabulary: int) -> dict:
    """``tokenizer.json`` of a character tokenizer with this many tokens."""
    texts = [*SPECIAL, *map(chr, range(32, 127)), "\n", "\t"]
    texts += [f" w{number}" for number in range(len(texts), vocabulary)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, text in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {text: number for number, text in enumerate(texts)},
            "unk_token": "<unk>",
        },
    }


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | shape, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(shape["vocab_size"])))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<unk>",
        "model_max_length": 1000000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    print(f"{folder}: {name}")


if __name__ == "__main__":
    main()
