"""Devices of three budgets in one round of real processes, each training another depth of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_fixture import Fleet, finish, share

pytestmark = pytest.mark.timeout(240)

BOTH = ("acc", "gyro")
#: FLOPs of a round of 40 samples: 14.69 M for the whole model, 14.57 M without its embeddings, 9.4 M for stage 2 alone.
BUDGETS = {"large": "20e6", "middle": "14.65e6", "small": "9.5e6"}


def trained(stages: str) -> set[str]:
    """The parts of both sensors' encoders, and what follows them."""
    names = ["embed" if n == "0" else f"stage{n}" for n in stages]
    return {f"{m}/{name}" for m in BOTH for name in [*names, "norm"]} | {"head/acc", "head/gyro", "fusion", "task"}


@pytest.mark.slow
def test_each_device_trains_the_depth_it_can_pay_and_each_part_is_averaged_over_those(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        for seed, (name, flops) in enumerate(BUDGETS.items()):
            fleet.agent(name, share(40, *BOTH, seed=seed), flops=flops)
        settings = {"slots.schedule": "mixed", "round.devices": 3, "round.quorum": 1.0}
        coordinator = fleet.coordinator("r1", settings)
        finish(coordinator)
        report = fleet.report("r1")
        assert [row.participants for row in report.rounds] == [("large", "middle", "small")] * 2
        depths = {(row.stage, row.device): set(row.trained) for row in report.assignments}
        assert depths == {
            (1, "large"): trained("012"),
            (1, "middle"): trained("01"),
            (1, "small"): trained("01"),
            (2, "large"): trained("012"),
            (2, "middle"): trained("12"),
            (2, "small"): trained("2"),
        }
        for row in report.assignments:
            assert row.measured["flops"].value == pytest.approx(row.predicted["flops"].value, rel=0.03)
            assert row.measured["flops"].value < float(BUDGETS[row.device])
        for row in report.rounds:
            averaged = {part: set(note["devices"]) for part, note in row.record["parts"].items()}
            for part in trained("012"):
                assert averaged[part] == {device for device in BUDGETS if part in depths[row.stage, device]}
