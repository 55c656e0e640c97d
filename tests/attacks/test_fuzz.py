"""Every decoder against its contract: the kept corpus, and by hypothesis what is nearly right (``tests/fuzz``)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz.mutate import mutated
from fuzz.seeds import SEEDS
from fuzz.seeds_people import SEEDS as SEEDS_OF_PEOPLE
from fuzz.table import TARGETS
from fuzz.target import CORPUS, Target, attempt, measured, room_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

#: Inputs of each target: with some thirty targets, some ten seconds in all.
EXAMPLES = 40
INPUTS = [(name, file) for name in TARGETS for file in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize(("name", "file"), INPUTS, ids=[f"{name}/{file.name}" for name, file in INPUTS])
def test_what_is_kept_is_taken_or_refused_within_its_memory(name, file):
    target, data = TARGETS[name], file.read_bytes()
    attempt(target, data)  # what is made once, such as an empty ledger
    refused, peak = measured(target, data)
    assert peak <= room_for(target, data), refused


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")  # a warning is no finding: the code under test runs as it does elsewhere
def test_what_is_nearly_right_is_taken_or_refused(name):
    target = TARGETS[name]
    seeds = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]

    @settings(max_examples=EXAMPLES // 5 if target.slow else EXAMPLES, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(seed=st.sampled_from(seeds), rng=st.randoms(use_true_random=False), any_bytes=st.binary(max_size=300))
    def tried(seed: bytes, rng: random.Random, any_bytes: bytes) -> None:
        attempt(target, mutated(seed, target.form, rng))
        attempt(target, any_bytes)

    tried()


def test_the_corpus_is_what_the_encoders_make(tmp_path):
    made = {(target, name): data for target, seeds in (SEEDS | SEEDS_OF_PEOPLE).items() for name, data in seeds()}
    kept = {
        (file.parent.name, file.name): file.read_bytes() for _, file in INPUTS if not file.name.startswith("found-")
    }
    assert made.keys() == kept.keys()
    assert {target for target, _ in made} == TARGETS.keys()
    pictures = {key for key in made if key[0] in {"png", "jpeg"}}  # their bytes are up to the library's version
    assert [key for key in made if key not in pictures and made[key] != kept[key]] == []


@pytest.mark.parametrize("name", [name for name in SEEDS if TARGETS[name].errors])
def test_every_encoder_s_own_output_is_taken(name):
    """A target that refuses everything would find nothing."""
    seeds = {file.name: file.read_bytes() for file in (CORPUS / name).iterdir() if not file.name.startswith("found-")}
    assert any(attempt(TARGETS[name], data) is None for data in seeds.values())


def _raises(data: bytes) -> None:
    raise KeyError(data)


def test_whatever_else_a_decoder_raises_is_a_finding():
    with pytest.raises(KeyError):
        attempt(Target("x", "x", _raises, ()), b"x")


def test_memory_that_is_claimed_and_never_touched_is_seen():
    import numpy as np

    _, peak = measured(Target("x", "x", lambda data: np.empty(2**28).resize(0), ()), b"")
    assert peak >= 2**31


def test_every_target_is_in_the_page():
    text = (Path(__file__).parents[2] / "docs" / "fuzzing.md").read_text(encoding="utf-8")
    listed = [line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith("| ") and " a byte |" in line]
    assert listed == list(TARGETS)
