"""Fusions from outside: built by one hook on devices, in the planner, in bundles; refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from export_fixture import some_state, stage_of, two_sensors, windows
from memory_fleet import check_trained, plan_of, run_fleet, share
from torch import Tensor, nn

from edgefl import registry
from edgefl.errors import ConfigError, ModelError
from edgefl.export.bundle import export_bundles
from edgefl.export.drafts import TrainedState
from edgefl.export.runtime import load_bundle
from edgefl.models.check import spec_problems
from edgefl.models.joint_fusion import Given, spread
from edgefl.models.spec import ModelSpec, fused_width, part_names
from edgefl.models.staged import build
from edgefl.registry import Option
from edgefl.roles import Fusion

SCALE = {"scale": Option(1.0, "a factor", least=0)}


class Largest(nn.Module):
    """The largest of the projections shown, entry by entry, times ``scale``; no weights."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, projections: list[Tensor], shown: list[Tensor] | None) -> Tensor:
        if shown is not None:
            projections = [r.masked_fill(~s.unsqueeze(1), -9.0) for r, s in zip(projections, shown, strict=True)]
        return self.scale * torch.stack(projections).amax(dim=0)


class Weighed(nn.Module):
    """The sum of the projections, each times a learned number."""

    def __init__(self, modalities: int) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.ones(modalities))

    def forward(self, projections: list[Tensor], shown: list[Tensor] | None) -> Tensor:
        return (torch.stack(projections, dim=2) * self.shares).sum(dim=2)


class FirstTokens(nn.Module):
    """A linear map of the first tokens' sum, stand-ins where there are none."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(one.width, model.head.out) for one in model.encoders.values())

    def forward(self, given: list[Given]) -> Tensor:
        found = []
        for own, one in zip(self.maps, given, strict=True):
            if one.state is None:
                found.append(one.r)
                continue
            tokens, _, has = spread(one.state.tokens, one.state.mask, one)
            made = own(tokens[:, 0])
            found.append(made if has is None else torch.where(has.unsqueeze(1), made, one.r))
        return torch.stack(found).sum(dim=0)


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._methods, "fusion", dict(registry.methods("fusion")))
    registry.register(
        Fusion("largest", "a test's", SCALE, build=lambda model, *, scale: Largest(scale), weights=False),
        Fusion("weighed", "a test's", build=lambda model: Weighed(len(model.encoders))),
        Fusion("first_tokens", "a test's", build=FirstTokens, tokens=True),
    )


def test_options_travel_in_the_specification_and_reach_the_module(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "end_to_end", "ab", 2, ["slots.fusion={largest: {scale: 3}}"])
    assert (plan.model.fusion, plan.model.fusion_options) == ("largest", {"scale": 3.0})
    spec = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.model), type=ModelSpec)
    r = {"a": torch.full((2, 8), 1.0), "b": torch.full((2, 8), 2.0)}
    has = {"a": torch.tensor([True, True]), "b": torch.tensor([True, False])}
    fused = build(spec, ["task"]).fuse(r, has)
    assert fused[:, 0].tolist() == [6, 3]
    assert build(spec, ["task"], device="meta").fuse({m: x.to("meta") for m, x in r.items()}).shape == (2, 8)
    by_default = plan_of(tmp_path, "end_to_end", "ab", 2, ["slots.fusion=largest"]).model
    assert by_default.fusion_options == {"scale": 1.0}


def test_fields_of_the_model_and_options_are_not_both_said(tmp_path: Path) -> None:
    """What older programs read of concat and joint is in fields of the specification."""
    for name in ("concat", "mean", "{joint: {width: 8, heads: 2}}"):
        assert plan_of(tmp_path, "end_to_end", "ab", 2, [f"slots.fusion={name}"]).model.fusion_options == {}


@pytest.mark.parametrize("name", ["largest", "weighed", "first_tokens"])
def test_a_fleet_trains_with_it(tmp_path: Path, name: str) -> None:
    settings = ["training.rounds=[0,2]", f"slots.fusion={name}", "slots.prototypes=class_mean"]
    plan = plan_of(tmp_path, "end_to_end", "ab", 2, settings)
    assert fused_width(plan.model) == 8
    assert ("fusion" in part_names(plan.model)) == (name != "largest")
    shares = {"x": share(24, {"a": 1.0, "b": 0.5}, 1), "y": share(24, {"a": 1.0}, 2)}
    report = run_fleet(tmp_path, plan, shares)
    assert report.status == "done"
    check_trained(tmp_path, plan)


@pytest.mark.parametrize("name", [pytest.param("largest", marks=pytest.mark.slow), "first_tokens"])
def test_a_bundle_answers_as_torch_with_a_modality_absent(tmp_path: Path, name: str) -> None:
    spec = two_sensors(fusion=name, fusion_options={"scale": 2.0} if name == "largest" else {})
    model, parts = some_state(spec, prototypes=False)
    rows = export_bundles(TrainedState(spec, stage_of(spec), parts), tmp_path / "b", mask="zero")
    assert max(row.max_difference for row in rows) < 1e-5
    acc = windows(spec, 6)["acc"]
    answer = load_bundle(tmp_path / "b" / "acc+gyro").predict({"acc": acc})
    with torch.no_grad():
        states = model.encode_batch_tokens({"acc": torch.from_numpy(acc)}, {"acc": None}, 6)
        r = {"acc": model.project("acc", model.pool_tokens("acc", states["acc"])), "gyro": torch.zeros(6, 8)}
        has = {"acc": torch.ones(6, dtype=torch.bool), "gyro": torch.zeros(6, dtype=torch.bool)}
        expected = model.classify(model.fuse(r, has, states))
    np.testing.assert_allclose(answer.logits, expected, atol=1e-5)


def test_a_result_of_another_width_is_refused_by_name() -> None:
    registry.register(Fusion("weighed_wide", "a test's", build=lambda model: Weighed(2), wide=True))
    model = build(two_sensors(fusion="weighed_wide"), ["fusion"])  # 12 wide, and projections are 8 wide
    with pytest.raises(ModelError, match=r"fusion weighed_wide makes \[3, 8\], and \[batch, 12\] is taken") as caught:
        model.fuse(dict.fromkeys(("acc", "gyro"), torch.zeros(3, 8)))
    assert "wide=True" in caught.value.remedy


def test_weights_that_would_never_travel_are_refused_by_name() -> None:
    registry.register(Fusion("hidden", "a test's", build=lambda model: Weighed(2), weights=False))
    with pytest.raises(ModelError, match="fusion hidden has shares, and declares that it has no weights"):
        build(two_sensors(fusion="hidden"), ["task"])


def test_what_is_not_installed_here_is_a_fault_of_the_specification() -> None:
    (problem,) = spec_problems(two_sensors(fusion="gated"))
    assert (problem.path, "'gated' is unknown; choose concat," in problem.message) == ("fusion", True)
    with pytest.raises(ConfigError, match=r"fusion\.largest\.power: unknown option; choose from: scale"):
        build(two_sensors(fusion="largest", fusion_options={"power": 2.0}), ["task"])
