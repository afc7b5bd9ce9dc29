"""A small test model whose answers show one wrong KV block.

Random weights with a large initial range make every answer depend on the whole context, and a
character tokenizer makes generated text tokenize to the tokens it came from. In float32 and at
temperature 0 a plain, a prefill/decode and a readback run then give the same answer, token for
token, and a single wrong block changes it.
"""

import importlib
import os
from pathlib import Path
from typing import Any, Literal

from pdctl.errors import PdctlError

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = [*map(chr, range(32, 127)), "\n", "\t"]
TokenizerKind = Literal["character", "bpe"]
SEED = 0
INITIALIZER_RANGE = 0.1
"""transformers' default of 0.02 gives a model that answers everything alike."""


def make_canary(folder: Path, tokenizer_kind: TokenizerKind = "character") -> None:
    """Write the model and its tokenizer into a folder.

    Args:
        tokenizer_kind: ``character``, or ``bpe`` for one that splits generated text differently
            than it was generated, as those of real models may.

    Raises:
        PdctlError: torch, transformers or tokenizers is not installed, or the folder cannot be
            written.
    """
    try:
        # The engine's own packages; nothing else of pdctl needs them.
        tokenizers: Any = importlib.import_module("tokenizers")
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise PdctlError(
            f"the canary model needs {error.name}: run this with the engine's Python", 2
        ) from None
    transformers.utils.logging.disable_progress_bar()
    splitter = (_characters if tokenizer_kind == "character" else _pairs)(tokenizers)
    splitter.decoder = tokenizers.decoders.Fuse()
    splitter.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=splitter,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE

    torch.manual_seed(SEED)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=INITIALIZER_RANGE,
    )
    model = transformers.Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        # Special tokens never win, so every answer has the length asked for.
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0

    # The folder appears complete or not at all.
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(draft)
        model.save_pretrained(draft)
        draft.rename(folder)
    except OSError as error:
        raise PdctlError(f"{folder}: {error.strerror}", 2) from None


def _characters(tokenizers: Any) -> Any:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *ALPHABET])}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[\s\S]"), "isolated"
    )
    return splitter


def _pairs(tokenizers: Any) -> Any:
    """Byte pair encoding with a token for every pair of lower-case letters or spaces."""
    letters = [letter for letter in ALPHABET if letter.islower() or letter == " "]
    merges = [(first, second) for first in letters for second in letters]
    tokens = [*SPECIAL_TOKENS, *ALPHABET, *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>"))
