"""Random run files: FLOPs and bytes as predicted, no accepted round beyond its budget; memory in the nightly tests."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import pytest

from benchmarks.cost.prediction_fuzz import Outcome, outcome, overruns
from benchmarks.cost.prediction_page import BOUNDS, compared, page, summary, within
from benchmarks.cost.random_runs import SMALL, WHOLE

#: As in docs/results/prediction_fuzz.md, where seeds of ``WHOLE`` are.
SEEDS, NIGHTLY = range(20), range(200)
#: Of them, those of every change's tests.
FEW = 10


def share(every: list[Outcome], title: str) -> float:
    bound = next(bound for bound in BOUNDS if bound.title == title)
    return statistics.mean(within(one, bound) for one in compared(every, bound))


def unpacked(every: list[Outcome]) -> list[Outcome]:
    """Runs in which every part travels as it is: estimates of packed bytes are tested with the packings."""
    return [one for one in every if set(one.traits["transfer"].values()) == {"f32"}]


def check(every: list[Outcome]) -> None:
    assert [found for one in every for found in overruns(one)] == []
    assert share(every, "FLOPs") >= 0.9
    plain = unpacked(every)
    assert share(plain, "bytes received") >= 0.9
    assert share(plain, "bytes sent") >= 0.9


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcome]:
    """The small run of a seed, carried out once."""
    return cache(lambda seed: outcome(seed, tmp_path_factory.mktemp("fuzz"), size=SMALL, alone=False))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [*SEEDS[:FEW], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[FEW:])])
def test_no_accepted_round_of_a_random_run_exceeds_its_budget(seed: int, small: Callable[[int], Outcome]) -> None:
    assert overruns(small(seed)) == []


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_twenty_random_runs_cost_what_was_predicted(small: Callable[[int], Outcome]) -> None:
    every = list(map(small, SEEDS))
    assert sum(bool(list(one.trained())) for one in every) >= 18  # the others were refused
    check(every)
    assert "Of 20 random runs **0 accepted rounds exceeded a budget**" in page(every)
    assert summary(every).startswith("| figure")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_random_runs_cost_what_was_predicted_in_memory_too(tmp_path):
    every = [outcome(seed, tmp_path / str(seed), size=WHOLE) for seed in NIGHTLY]
    check(every)
    assert share(every, "memory of the whole trainer") >= 0.95
    assert share(every, "the same, or 4 MiB off") >= 0.85
