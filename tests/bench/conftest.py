"""A router between fake engines, to send load to."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from router_rig import Router, launch

from fake_engine import FakeEngine
from pdctl.bench.words import fresh_text

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def served_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    prefill, decode = FakeEngine("prefill").start(), FakeEngine("decode").start()
    router = launch(tmp_path_factory.mktemp("served"), [prefill], [decode])
    yield router
    router.stop()
    prefill.stop()
    decode.stop()


@pytest.fixture
def served(served_once: Router) -> Router:
    served_once.reset()
    return served_once


@pytest.fixture(scope="session")
def subword_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a byte-pair tokenizer, whose tokens are parts of words."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    made: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([fresh_text(str(n), 4000) for n in range(4)], trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
