"""The token proof matches the turn it was made for, as far as a prompt continues it."""

import json
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.identity import Identity
from pd_connector.proof import (
    VERSION,
    block_size_of,
    continued,
    make_proof,
    packed,
    proof_seed,
    tokens_per_digest,
    tokens_proven,
    unprovable,
)

MODEL = ("model", None, "model", None)
SEED = proof_seed(MODEL, None, None)
BLOCK = 16
TURN = list(range(1000, 1000 + 5 * BLOCK + 7))
N = len(TURN)

token_lists = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300)


def proof(ids: list[int] = TURN, seed: bytes = SEED) -> dict[str, Any]:
    return make_proof(seed, ids, BLOCK)


@settings(deadline=None)
@given(turn=token_lists, rest=token_lists)
def test_a_prompt_that_continues_the_turn_matches(turn: list[int], rest: list[int]) -> None:
    assert tokens_proven(proof(turn), len(turn), SEED, turn + rest) == len(turn)
    assert tokens_proven(proof(turn), len(turn), SEED, turn) == len(turn)


@settings(deadline=None)
@given(turn=token_lists, data=st.data())
def test_one_changed_token_ends_the_match_at_the_block_before_it(
    turn: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(turn) - 1))
    changed = [*turn[:at], turn[at] ^ 1, *turn[at + 1 :], 5, 5]
    assert tokens_proven(proof(turn), len(turn), SEED, changed) == at // BLOCK * BLOCK


@settings(deadline=None)
@given(turn=token_lists, data=st.data())
def test_a_prompt_that_ends_within_the_turn_matches_in_whole_blocks(
    turn: list[int], data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(turn) - 1))
    known = tokens_proven(proof(turn), len(turn), SEED, turn[:length])
    assert known == length // BLOCK * BLOCK


def test_an_inserted_or_a_dropped_token_shifts_all_that_follows() -> None:
    assert tokens_proven(proof(), N, SEED, [7, *TURN]) == 0
    assert tokens_proven(proof(), N, SEED, [*TURN[:40], *TURN[41:], 7]) == 2 * BLOCK


def test_a_proof_of_another_length_than_the_handle_does_not_match() -> None:
    assert tokens_proven(proof(), N - 1, SEED, TURN) == 0
    assert tokens_proven(proof(), N + 1, SEED, [*TURN, 1]) == 0


OTHER_SEEDS = {
    "model": proof_seed(("model-2", None, "model", None), None, None),
    "tokenizer": proof_seed(("model", None, "other", None), None, None),
    "lora": proof_seed(MODEL, "adapter", None),
    "cache_salt": proof_seed(MODEL, None, "tenant"),
    "key": proof_seed(MODEL, None, None, b"k" * 32),
}


@pytest.mark.parametrize("other", OTHER_SEEDS.values(), ids=OTHER_SEEDS)
def test_what_else_decides_the_kv_is_part_of_the_proof(other: bytes) -> None:
    assert tokens_proven(proof(), N, other, TURN) == 0
    assert tokens_proven(proof(seed=other), N, other, TURN) == N


def test_parts_of_the_seed_cannot_be_shifted_into_each_other() -> None:
    seeds = {
        proof_seed(MODEL, "a", None),
        proof_seed(MODEL, None, "a"),
        proof_seed(("modela", None, "model", None), None, None),
        proof_seed(('model","a', None, "model", None), None, None),
        proof_seed(MODEL, "", None),
    }
    assert len(seeds) == 5


def test_another_image_ends_the_match_at_the_block_it_begins_in() -> None:
    image, other = [(2 * BLOCK + 3, 10, "image")], [(2 * BLOCK + 3, 10, "other")]
    made = make_proof(SEED, TURN, BLOCK, image)
    assert tokens_proven(made, N, SEED, TURN, image) == N
    assert tokens_proven(made, N, SEED, TURN, other) == 2 * BLOCK
    assert tokens_proven(made, N, SEED, TURN) == 2 * BLOCK
    in_the_tail = [(5 * BLOCK + 1, 2, "image")]
    assert tokens_proven(make_proof(SEED, TURN, BLOCK, in_the_tail), N, SEED, TURN) == 5 * BLOCK


def changed(**fields: Any) -> dict[str, Any]:
    return {**proof(), **fields}


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "x",
        {},
        {"v": VERSION},
        {"v": 1, "n": N, "digest": "d999a370520011f90017675f70af25f8"},
        changed(v=VERSION + 1),
        changed(n=str(N)),
        changed(g=0),
        changed(g=-BLOCK),
        changed(g="16"),
        changed(g=True),
        changed(g=2 * BLOCK),
        changed(d=None),
        changed(d="%%%"),
        changed(d=""),
        changed(e=""),
        changed(e=5),
        unprovable(N, BLOCK),
        proof([*TURN[:-1], -1]),
    ],
)
def test_a_proof_that_is_not_understood_proves_nothing(wrong: object) -> None:
    assert tokens_proven(wrong, N, SEED, TURN) == 0


def test_a_token_id_outside_the_range_proves_nothing() -> None:
    assert tokens_proven(proof(), N, SEED, [-1, *TURN[1:]]) == 0


def test_digests_of_the_whole_alone_prove_all_or_nothing() -> None:
    made = make_proof(SEED, TURN, BLOCK, whole_only=True)
    assert len(json.dumps(made)) < 120
    assert tokens_proven(made, N, SEED, [*TURN, 1]) == N
    assert tokens_proven(made, N, SEED, [*TURN[:-1], 0]) == 0


def test_the_digests_are_the_same_on_every_machine() -> None:
    assert make_proof(SEED, [1, 2, 3], 2) == {
        "v": 2,
        "n": 3,
        "b": 2,
        "g": 2,
        "d": "Kf7vAtxw",
        "e": "p8lvVw4lxq26CGYOEsrbkQ==",
    }


@pytest.mark.parametrize(
    ("tokens", "block", "most"), [(24_000, 128, 1650), (32_768, 128, 2200), (1_000_000, 16, 2200)]
)
def test_the_field_stays_small(tokens: int, block: int, most: int) -> None:
    ids = random.Random(0).choices(range(200_000), k=tokens)
    made = make_proof(SEED, ids, block)
    assert len(json.dumps(made)) < most
    assert made["g"] == tokens_per_digest(tokens, block)
    assert made["g"] % block == 0
    assert tokens_proven(made, tokens, SEED, [*ids, 1]) == tokens


def test_the_block_size_is_told() -> None:
    assert block_size_of(proof()) == BLOCK
    assert block_size_of({"v": 1, "n": 3}) is None
    assert block_size_of(None) is None


def test_contract_and_pure_parts_import_no_engine() -> None:
    parts = "contract plugin proof readback seams stream params signature secret transport counters"
    code = (
        f"import sys, importlib; [importlib.import_module('pd_connector.' + name) for name in "
        f"{parts.split()!r}]; "
        "sys.exit(any(name.split('.')[0] in ('vllm', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kept", [0, 150, 300, 310])
def test_a_prompt_that_was_compared_is_not_packed_again_for_its_turn(kept: int) -> None:
    request = SimpleNamespace(
        prompt_token_ids=list(range(300)),
        all_token_ids=list(range(310)),
        prompt_embeds=None,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
    )
    identity = Identity(SimpleNamespace(model="m"), BLOCK)
    ready = packed(request.prompt_token_ids)
    assert identity.proof(request, kept, ready) == identity.proof(request, kept)


@pytest.mark.parametrize("ids", [[-1, 2], [1, 2]])
def test_an_id_outside_the_range_in_the_answer_proves_nothing(ids: list[int]) -> None:
    proof = make_proof(SEED, continued(packed(ids), [1 << 32]), BLOCK)
    assert tokens_proven(proof, 3, SEED, [*ids, 1 << 32]) == 0
