"""The study of eligible devices: the planner, not a list, says who has the memory for which training."""

from __future__ import annotations

import pytest
from data_fixture import needed

import edgefl
from benchmarks.accuracy.claims import as_fleet, eligible
from benchmarks.accuracy.claims.__main__ import RESULTS, standing
from benchmarks.accuracy.claims.study import Cell, Study
from edgefl.api.runs import read_run


def budgeted(method: str) -> dict:
    """A run file of the study from random weights, as the pretrained ones may not be there."""
    values = Study("eligible").run_file(Cell("eligible", "har", "complete", method, 1), {"lr": 1e-3})
    for encoder in values["model"]["encoders"].values():
        encoder.pop("pretrained")
    if method == "lw-fedmml":
        values["slots"] = {"schedule": {"layerwise": {"embed": "frozen"}}}  # as they are when pretrained
    return values


def test_who_is_eligible_is_drawn_by_the_seed() -> None:
    names, budget = [f"device-{i:02d}" for i in range(10)], {"step_memory_bytes": "4 MiB"}
    few, more = (eligible.limited(names, count, budget, 1) for count in (3, 5))
    free = [{one["name"] for one in fleet if "budget" not in one} for fleet in (few, more)]
    assert (len(free[0]), len(free[1])) == (3, 5)
    assert free[0] < free[1]
    assert few != eligible.limited(names, 3, budget, 2)


@pytest.mark.data
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("method", "refused"),
    [
        ("lw-fedmml", 0),
        pytest.param("fedavg-3", 7, marks=pytest.mark.slow),
        pytest.param("prog-5", 5, marks=pytest.mark.slow),
    ],
)
def test_the_planner_refuses_by_memory_whom_layer_wise_training_admits(method: str, refused: int) -> None:
    needed("har_hapt")
    values = budgeted(method)
    found = eligible.refused(values)
    assert len(found) == refused
    assert all(why.reason == "step_memory" and why.needed > why.allowed for why in found.values())
    assert found.keys() <= {one["name"] for one in values["fleet"] if "budget" in one}
    carried = eligible.for_one_process(values)
    assert {one["name"] for one in carried["fleet"] if "budget" in one} == found.keys()


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("method", "trained"), [("lw-fedmml", 10), ("fedavg-3", 3)])
def test_a_real_fleet_with_the_same_budgets_has_the_same_devices(method: str, trained: int, tmp_path) -> None:
    needed("har_hapt")
    values = budgeted(method) | {"evaluate": "stage"}
    values["training"]["rounds"] = [0, 0, 1]
    run = edgefl.run(values, directory=tmp_path, export=False, page=False)
    report = read_run(run.directory)
    (last,) = report.rounds
    assert len(last.participants) == trained
    small = [row for row in report.assignments if row.refusal is not None or row.micro_batch]
    assert len(small) == 7
    for row in small:
        if row.refusal is not None:
            assert row.refusal.reason == "step_memory"
        else:
            assert row.measured["step_peak_bytes"].value <= 4.5 * 2**20


def test_what_has_memory_budgets_is_not_compared_with_one_process() -> None:
    papers = {cell.paper for _, cell in as_fleet.first_cells([])}
    assert "layerwise" in papers
    assert "eligible" not in papers


def test_recorded_runs_had_the_devices_that_their_budgets_admit() -> None:
    study, lines, _ = standing(Study("eligible"), RESULTS)
    assert lines
    for row in lines:
        eligible_ = study.methods[row.method].get("eligible")
        admitted = 10 if row.method in {"lw-fedmml", "fedavg-10"} else eligible_
        assert (row.devices, len(row.refused)) == (admitted, 10 - admitted)
