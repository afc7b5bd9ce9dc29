"""The token proof matches the turn it was made for and nothing else."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.proof import VERSION, make_proof, proof_matches, proof_seed, unprovable

SEED = proof_seed("model", None, None, [])
TURN = list(range(1000, 1300))

token_lists = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300)


@settings(deadline=None)
@given(turn=token_lists, rest=token_lists)
def test_a_prompt_that_continues_the_turn_matches(turn: list[int], rest: list[int]) -> None:
    assert proof_matches(make_proof(SEED, turn), len(turn), SEED, turn + rest)
    assert proof_matches(make_proof(SEED, turn), len(turn), SEED, turn)


@settings(deadline=None)
@given(turn=token_lists, data=st.data())
def test_one_changed_token_does_not_match(turn: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(turn) - 1))
    changed = [*turn[:at], turn[at] ^ 1, *turn[at + 1 :]]
    assert not proof_matches(make_proof(SEED, turn), len(turn), SEED, changed)


def test_an_inserted_or_a_dropped_token_does_not_match() -> None:
    proof = make_proof(SEED, TURN)
    assert not proof_matches(proof, len(TURN), SEED, [7, *TURN])
    assert not proof_matches(proof, len(TURN), SEED, [*TURN[:100], *TURN[101:], 7])


def test_a_prompt_shorter_than_the_turn_does_not_match() -> None:
    assert not proof_matches(make_proof(SEED, TURN), len(TURN), SEED, TURN[:-1])


def test_a_proof_of_another_length_than_the_handle_does_not_match() -> None:
    proof = make_proof(SEED, TURN)
    assert not proof_matches(proof, len(TURN) - 1, SEED, TURN)
    assert not proof_matches(proof, len(TURN) + 1, SEED, [*TURN, 1])


@pytest.mark.parametrize(
    "other",
    [
        proof_seed("model-2", None, None, []),
        proof_seed("model", "adapter", None, []),
        proof_seed("model", None, "tenant", []),
        proof_seed("model", None, None, [(10, 5, "image")]),
    ],
    ids=["model", "lora", "cache_salt", "multimodal"],
)
def test_what_else_decides_the_kv_is_part_of_the_proof(other: bytes) -> None:
    assert not proof_matches(make_proof(SEED, TURN), len(TURN), other, TURN)
    assert proof_matches(make_proof(other, TURN), len(TURN), other, TURN)


def test_parts_of_the_seed_cannot_be_shifted_into_each_other() -> None:
    seeds = {
        proof_seed("m", "a", None, []),
        proof_seed("m", None, "a", []),
        proof_seed("ma", None, None, []),
        proof_seed('m","a', None, None, []),
        proof_seed("m", "", None, []),
    }
    assert len(seeds) == 5


@pytest.mark.parametrize(
    "proof",
    [
        None,
        [],
        "x",
        {},
        {"v": VERSION},
        {"v": VERSION + 1, "n": len(TURN), "digest": make_proof(SEED, TURN)["digest"]},
        {"v": VERSION, "n": str(len(TURN)), "digest": make_proof(SEED, TURN)["digest"]},
        {"v": VERSION, "n": len(TURN), "digest": None},
        unprovable(len(TURN)),
        make_proof(SEED, [*TURN[:-1], -1]),
    ],
)
def test_a_proof_that_is_not_understood_does_not_match(proof: object) -> None:
    assert not proof_matches(proof, len(TURN), SEED, TURN)


def test_a_token_id_outside_the_range_does_not_match() -> None:
    proof = make_proof(SEED, TURN)
    assert not proof_matches(proof, len(TURN), SEED, [-1, *TURN[1:]])


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert make_proof(SEED, [1, 2, 3]) == {
        "v": 1,
        "n": 3,
        "digest": "d999a370520011f90017675f70af25f8",
    }


def test_a_long_turn_matches() -> None:
    ids = [random.Random(0).randrange(200_000) for _ in range(32_768)]
    assert proof_matches(make_proof(SEED, ids), len(ids), SEED, [*ids, 1])


def test_contract_and_pure_parts_import_no_engine() -> None:
    code = (
        "import sys, pd_connector.contract, pd_connector.plugin, pd_connector.proof, "
        "pd_connector.readback, pd_connector.seams, pd_connector.stream; "
        "sys.exit(any(name.split('.')[0] in ('vllm', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
