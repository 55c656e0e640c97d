"""Stand-ins from outside: with options and weights of their own, in training, evaluation and bundles alike."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from export_fixture import some_state, stage_of, two_sensors, windows
from memory_fleet import check_trained, plan_of, run_fleet, share, state_of
from torch import Tensor, nn

from edgefl import registry
from edgefl.api.export_run import export_run
from edgefl.errors import ConfigError, ExportError
from edgefl.export.bundle import export_bundles
from edgefl.export.drafts import TrainedState
from edgefl.export.runtime import Bundle, load_bundle
from edgefl.models.check import spec_problems
from edgefl.models.spec import ModelSpec, part_names
from edgefl.models.staged import StagedModel, build
from edgefl.protocol.tensors import decode_part
from edgefl.registry import Option
from edgefl.report.quality import evaluation
from edgefl.roles import StandIn
from edgefl.training.fill import AtHand, Made

LEVEL = {"level": Option(0.5, "of every entry")}
SHARES = {"x": share(24, {"a": 1.0, "b": 0.5}, 1), "y": share(24, {"a": 0.5, "b": 1.0}, 2)}


class Rows(nn.Module):
    """A learned row a modality."""

    def __init__(self, model: ModelSpec, level: float) -> None:
        super().__init__()
        self.names = list(model.encoders)
        self.rows = nn.Parameter(torch.full((len(self.names), model.head.out), level))


def level(modality: str, given: AtHand) -> Made:
    return Made(given.zeros() + float(given.options["level"]), given.rows(True))


def row(modality: str, given: AtHand) -> Made:
    module = given.module
    assert isinstance(module, Rows)
    return Made(given.zeros() + module.rows[module.names.index(modality)], given.rows(True))


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._methods, "missing", dict(registry.methods("missing")))
    registry.register(
        StandIn("level", "a test's", LEVEL, make=level, offered=lambda model, tables: True),
        StandIn("row", "a test's", LEVEL, make=row, build=lambda model, *, level: Rows(model, level)),
    )


def answer(model: StagedModel, acc: np.ndarray, stand_in: Tensor) -> Tensor:
    """Logits of samples that have acc alone, ``stand_in`` [d] in place of gyro."""
    with torch.no_grad():
        states = model.encode_batch_tokens({"acc": torch.from_numpy(acc)}, {"acc": None}, len(acc))
        r = {"acc": model.project("acc", model.pool_tokens("acc", states["acc"])), "gyro": stand_in.expand(len(acc), 8)}
        return model.classify(model.fuse(r))


def test_a_bundle_answers_by_the_recipes_options(tmp_path: Path) -> None:
    spec = two_sensors()
    model, parts = some_state(spec, prototypes=False)
    state = TrainedState(spec, stage_of(spec), parts, missing={"level": {"level": -0.25}})
    export_bundles(state, tmp_path / "b", mask="level")
    acc = windows(spec, 6)["acc"]
    for name in ("acc", "acc+gyro"):
        bundle = load_bundle(tmp_path / "b" / name)
        assert (bundle.manifest.mask, bundle.manifest.masks) == ("level", ("level",))
        np.testing.assert_allclose(
            bundle.predict({"acc": acc}).logits, answer(model, acc, torch.full((8,), -0.25)), atol=1e-5
        )


@pytest.mark.slow
def test_a_bundle_answers_by_the_weights_that_were_trained(tmp_path: Path) -> None:
    spec = two_sensors(stand_in={"row": {"level": 0.5}})
    assert part_names(spec)[-2:] == ["missing", "task"]
    model, parts = some_state(spec, prototypes=False)
    parts["missing"] = {"rows": np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)}
    export_bundles(TrainedState(spec, stage_of(spec), parts), tmp_path / "b", mask="row")
    acc = windows(spec, 6)["acc"]
    found = load_bundle(tmp_path / "b" / "acc+gyro").predict({"acc": acc})
    np.testing.assert_allclose(
        found.logits, answer(model, acc, torch.from_numpy(parts["missing"]["rows"][1])), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights"), [("level", False), ("row", True)])
def test_a_fleet_trains_evaluates_and_exports_with_it(tmp_path: Path, name: str, weights: bool) -> None:
    settings = ["training.rounds=[0,2]", f"slots.missing={{{name}: {{level: 0.75}}}}", "slots.prototypes=none"]
    plan = plan_of(tmp_path, "end_to_end", "ab", 2, settings)
    assert (plan.model.stand_in or {}) == ({"row": {"level": 0.75}} if weights else {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan.model), type=ModelSpec) == plan.model
    report = run_fleet(tmp_path, plan, SHARES)
    assert report.status == "done"
    check_trained(tmp_path, plan)
    store, state = state_of(tmp_path)
    assert ("missing" in state) == weights
    if weights:
        assert np.abs(decode_part(store.read(state["missing"].id))["rows"] - 0.75).min() > 0  # both rows have learned
    done = export_run(tmp_path / "run")
    assert done.mask == name
    with np.load(tmp_path / "test.npz") as test:
        alone = load_bundle(tmp_path / "run" / "bundles" / "a+b").predict({"a": test["a"]})
        right = float((alone.classes == test["label"]).mean())
        assert accuracy_of(load_bundle(tmp_path / "run" / "bundles" / "a"), test) == right
    (told,) = (
        row.value
        for row in report.evaluations
        if (row.round, row.available, row.missing, row.metric) == (2, ("a",), name, "accuracy")
    )
    assert right == pytest.approx(told)
    assert f"{name} mask" in [column.name for column in evaluation(report).columns]


def accuracy_of(bundle: Bundle, test: np.lib.npyio.NpzFile) -> float:
    return float((bundle.predict({"a": test["a"]}).classes == test["label"]).mean())


def test_stand_ins_of_training_alone_are_named_by_the_export(tmp_path: Path) -> None:
    settings = ["training.rounds=[0,1]", "slots.missing=random", "slots.prototypes=none"]
    run_fleet(tmp_path, plan_of(tmp_path, "end_to_end", "ab", 2, settings), SHARES)
    told: list[str] = []
    assert export_run(tmp_path / "run", say=told.append).mask == "zero"
    assert "stand-ins in the bundles: zero; those of missing: random are made in training alone" in told


def test_a_model_without_its_weights_cannot_make_it(tmp_path: Path) -> None:
    spec = two_sensors()
    _, parts = some_state(spec, prototypes=False)
    with pytest.raises(ExportError, match="the model cannot make the stand-ins row"):
        export_bundles(TrainedState(spec, stage_of(spec), parts), tmp_path / "b", mask="row")


def test_what_is_not_installed_here_is_a_fault_of_the_specification() -> None:
    (problem,) = spec_problems(two_sensors(stand_in={"token": {}}))
    assert (problem.path, "'token' is unknown; choose zero," in problem.message) == ("stand_in", True)
    with pytest.raises(ConfigError, match=r"missing\.row\.power: unknown option; choose from: level"):
        build(two_sensors(stand_in={"row": {"power": 2.0}}), ["missing"])
