"""What MMiC's paper and its authors' code do differently, each an option."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share
from test_methods_server import FOUR_BY_THREE

from edgefl.aggregation.history import Memory, Track
from edgefl.data.dataset import Dataset
from edgefl.methods import select
from edgefl.methods.missing.zero_input import complete, completed_counts
from edgefl.methods.optimise.portfolio import portfolio
from edgefl.models.spec import EncoderSpec
from edgefl.training.batches import make_batch, unmixed_rows

FIGURES = ("measured", "predicted")
ENCODERS = {m: EncoderSpec() for m in "ab"}


def test_in_percent_points_the_variance_weighs_a_hundred_times_as_much() -> None:
    """Returns .1 and -.1: cov = (.1^2 + .2^2) / 1 = .05, gamma = (.05 + .1) / 2; in points (500 + 10) / 2 = 255."""
    memory = Memory(rounds=2, devices={"a": Track(returns={1: 0.1, 2: -0.1})})
    for unit, gamma in (("fraction", 0.075), ("percent", 255.0)):
        changed, record = portfolio(memory, {"a": 0}, {"a": 1.0}, unit=unit)
        assert record["momentum"]["gamma"] == pytest.approx(gamma)  # type: ignore[index]
        assert changed["beta"] == pytest.approx(0.9 + np.tanh(gamma) / 10)


def test_a_warm_up_over_all_devices_knows_no_clusters() -> None:
    """4 of 12 in four clusters of three: inside clusters always two of each of two."""

    def clusters(warmup: str, seed: int) -> int:
        options = {"share": 1 / 3, "warmup_rounds": 100, "warmup": warmup}
        rng = np.random.default_rng(seed)
        drawn = select.banzhaf(sorted(FOUR_BY_THREE.devices), rng, FOUR_BY_THREE, **options)
        return len({name[0] for name in drawn})

    assert {clusters("clusters", seed) for seed in range(40)} == {2}
    assert {clusters("all", seed) for seed in range(40)} == {2, 3, 4}


# ---- zeros at the input


def lacking() -> Dataset:
    """Three samples: the second lacks b."""
    values = {m: np.ones((3, 2, 1), np.float32) for m in "ab"}
    values["b"][1] = 0
    present = {"a": np.ones(3, bool), "b": np.array([True, False, True])}
    return Dataset(values, present, np.array([0, 1, 0]), ("x", "y"), ["0", "1", "2"])


def test_zeros_at_the_input_are_a_modality_like_any_other() -> None:
    done = complete(lacking(), ENCODERS).dataset
    batch = make_batch(done, np.arange(3), ["a", "b"], "cpu")
    assert (batch.rows, batch.complete) == ({"a": None, "b": None}, 2)
    assert batch.inputs["b"].flatten(1).tolist() == [[1, 1], [0, 0], [1, 1]]  # type: ignore[union-attr]
    assert completed_counts({"": 3, "a": 3, "b": 2, "c": 0}, ENCODERS) == {"": 3, "a": 3, "b": 3, "c": 0}
    assert complete(lacking().subset([1, 2]), {"a": ENCODERS["a"]}).dataset.has("b").tolist() == [False, True]


def test_which_samples_were_whole_is_still_known() -> None:
    done = complete(lacking(), ENCODERS).dataset
    assert done.complete(["a", "b"]).tolist() == [True, False, True]
    assert done.subset([1, 2]).complete(["a", "b"]).tolist() == [False, True]
    rows = unmixed_rows(done, np.arange(3), ["a", "b"], 1, np.random.default_rng(0))
    assert sorted(int(row[0]) for row in rows) == [0, 1, 2]


def test_a_run_with_zeros_at_the_input_costs_and_mends_as_told(ram_path: Path) -> None:
    """All rows pass both encoders: more FLOPs than zeros at the projection, as predicted; layers are still mended."""
    settings = ["training.batch_size=6", "training.rounds=[0, 3]", "evaluate=stage", "slots.select=all"]
    spent = {}
    for missing in ("zero", "zero_input"):
        folder = ram_path / missing
        folder.mkdir()
        plan = plan_of(folder, "mmic", "ab", 4, [*settings, f"slots.missing={missing}"])
        report = run_fleet(folder, plan, {f"d{i}": share(40, {"a": 1.0, "b": 0.5}, seed=i) for i in range(4)})
        done = [row for row in report.assignments if row.status == "done"]
        spent[missing], told = (sum(getattr(row, key)["flops"].value or 0.0 for row in done) for key in FIGURES)
        assert spent[missing] == pytest.approx(told, rel=0.03 if missing == "zero_input" else 0.15)
        assert any("donors" in one for row in report.rounds for one in row.record["repaired"].values())
    assert spent["zero_input"] > 1.15 * spent["zero"]
