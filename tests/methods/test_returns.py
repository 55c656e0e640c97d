"""What goes by devices' returns gets samples to measure them on, by default, and acts on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_fleet import plan_of, run_fleet, share, state_of

from edgefl.aggregation.history import load
from edgefl.api.run_inputs import PlanOptions, assumptions
from edgefl.config.profiles import shipped
from edgefl.errors import ConfigError
from edgefl.registry import chosen

SMALL = ["training.batch_size=6", "training.holdout=null"]
BANZHAF = "slots.select={banzhaf: {share: 0.5, warmup_rounds: 1}}"


@pytest.mark.parametrize("recipe", shipped("recipes"))
def test_a_recipe_that_goes_by_returns_has_a_hold_out(tmp_path: Path, recipe: str) -> None:
    plan = plan_of(tmp_path, recipe, "ab", 2, SMALL)
    going = [role for role in ("select", "optimise") if chosen(role, plan.server[role])[0].method.returns]
    assert bool(going) == (recipe in {"mmic", "mmic-gmc", "mmic-reconstruction"})
    assert not going or {hyper.holdout for hyper in plan.hypers} == {0.2}


@pytest.mark.parametrize(
    "slot", [BANZHAF, "slots.optimise=fedadagrad_mpo", "slots.optimise={fedadagrad_mpo: {lr: 0.1}}"]
)
def test_a_slot_that_goes_by_returns_is_refused_without_a_hold_out(tmp_path: Path, slot: str) -> None:
    assert plan_of(tmp_path, "end_to_end", "ab", 2, [*SMALL, slot]).hypers[0].holdout == 0.2
    assert plan_of(tmp_path, "end_to_end", "ab", 2, [slot, "training.holdout=0.1"]).hypers[0].holdout == 0.1
    with pytest.raises(ConfigError) as refused:
        plan_of(tmp_path, "end_to_end", "ab", 2, [slot, "training.holdout=0"])
    assert "training.holdout" in refused.value.message
    assert slot.partition("=")[2].strip("{").partition(":")[0] in refused.value.message


def test_a_plan_tells_of_the_hold_out_that_nobody_asked_for(tmp_path: Path) -> None:
    plan_of(tmp_path, "mmic", "ab", 2, [])
    file = str(tmp_path / "run.yaml")
    told = " ".join(assumptions(file, ["training.holdout=null"], PlanOptions()))
    assert "20% of each device's samples are not trained on" in told
    assert "select: banzhaf and optimise: fedadagrad_mpo" in told
    assert "holdout" not in " ".join(assumptions(file, [], PlanOptions()))  # it is set there
    assert "holdout" not in " ".join(assumptions(file, ["recipe=end_to_end", "training.holdout=null"], PlanOptions()))


def test_the_shipped_mmic_has_returns_in_every_round(ram_path: Path) -> None:
    """Eight devices, half of them drawn a round: each has a return in each of its rounds, the first one too."""
    settings = [*SMALL, "training.rounds=[0, 12]", "evaluate=stage", BANZHAF]
    plan = plan_of(ram_path, "mmic", "ab", 8, settings)
    report = run_fleet(ram_path, plan, {f"d{i}": share(36, {"a": 0.8, "b": 0.8}, seed=i) for i in range(8)})
    moments = [row.record["momentum"] for row in report.rounds if row.status == "done"]
    assert len(moments) == 12
    for row, told in zip(report.rounds, moments, strict=True):
        measured = [device for cluster in told["clusters"].values() for device in cluster["devices"]]
        assert sorted(measured) == sorted(row.participants)
        assert told["left_out"] == {}
    assert all(told["gamma"] != 0 for told in moments)
    assert any(told["beta"] > 0.9 for told in moments)
    store, state = state_of(ram_path)
    tracks = load(store, state).devices.values()
    assert sum(track.core for track in tracks) > 0
    assert any(track.core < track.selected for track in tracks)  # so that the draw is not uniform
