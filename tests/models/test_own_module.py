"""A user's own module as an encoder: cut into stages, priced, trained by them, exported; or refused with a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from msgspec import structs
from torch import Tensor, nn
from training_fixture import job, parts_of, stages_of, with_hyper

import edgefl
from coordinator.ledger.ledger import Ledger
from edgefl import encoder_kinds
from edgefl.api.export_run import final_state
from edgefl.api.study_cells import Work, planned
from edgefl.data.dataset import Dataset
from edgefl.encoder_kinds import EncoderKind, encoder_kind, given_here, name_of
from edgefl.errors import ConfigError, EdgeFLError, ExportError, ModelError
from edgefl.models.check import encoder_of_size, spec_problems, state_shape
from edgefl.models.parts import part_tensors
from edgefl.models.spec import HeadSpec, LoraSpec, ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Job
from edgefl.plan.training_samples import prefixes, with_cache
from edgefl.pricing.round_price import price_step
from edgefl.resources.tensor_counters import FlopCounter, LiveBytes
from edgefl.storage.disk import LEDGER
from edgefl.training.batches import Batch
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import LocalState, train_round
from edgefl.training.prefix_cache import PrefixCache
from edgefl.training.step import make_optimizer, prepare, train_step

STAGES = [["first", "norm"], ["second"], ["gru", "out"]]


class Net(nn.Module):
    """Convolutions with the channels first, then a GRU; 8, 10 and 12 wide, 20, 10 and 10 steps, and an answer of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.relu = nn.ReLU()
        self.second = nn.Conv1d(8, 10, 3, stride=2, padding=1)
        self.gru = nn.GRU(10, 12, batch_first=True)
        self.out = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x.transpose(1, 2))))
        x = self.second(x)
        x, _ = self.gru(F.relu(x).transpose(1, 2))
        return self.out(x[:, -1])


class Picture(nn.Module):
    """A small residual network over [H, W, C] with a learned shift, whose blocks come in a list: tokens [B, N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1, 1, 1, 3))
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.shift).permute(0, 3, 1, 2)
        x = self.layers[0](x)
        x = self.layers[1](x + x.tanh())
        return x.flatten(2).transpose(1, 2)


class Recurrent(nn.Module):
    """An LSTM of two layers and both directions, as one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class Plain(nn.Module):
    """Two linear layers over [20, 3]; ``between`` is what a test puts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 4)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.two(self.between(self.one(x)).mean(1))


def kind_of_net() -> EncoderKind:
    return edgefl.encoder(Net, input_shape=(20, 3), stages=STAGES)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[list[str]] | None]] = {
    "net": (Net, (20, 3), STAGES),
    "picture": (Picture, (6, 8, 3), [["shift", "layers.0"], ["layers.1"]]),
    "whole": (Recurrent, (20, 3), None),
}


def spec_of(name: str, stages: int = 0, **changes: object) -> ModelSpec:
    factory, shape, cut = CASES[name]
    kind = edgefl.encoder(factory, input_shape=shape, stages=cut)
    encoder = encoder_of_size(name_of(kind), "tiny", shape)
    return ModelSpec({"m": encoder}, stages or len(cut or [0]), HeadSpec(8, 4), 8, 3, ("x", "y", "z"), **changes)


def tensors_of(model: StagedModel) -> dict[str, Tensor]:
    """The module's own tensors by their own names, wherever the stages have them."""
    found = {}
    for part in model.parts_present:
        if "/stage" in part:
            state = model.part(part).state_dict()
            found |= {name.partition(".stage.")[2]: tensor for name, tensor in state.items()}
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("merged", [False, True])
def test_the_stages_one_after_the_other_are_the_module(name: str, merged: bool) -> None:
    spec = spec_of(name, stages=1 if merged else 0)
    factory, shape, _ = CASES[name]
    model, whole = build(spec).eval(), factory().eval()
    whole.load_state_dict(tensors_of(model))  # all of them, each once
    x = torch.randn(4, *shape)
    state = model.embed("m", x)
    for k in range(1, spec.stages + 1):
        state = model.stage("m", k, state)
        assert tuple(state.tokens.shape[1:]) == state_shape(spec, "m", k)
        assert model.pool("m", state).shape == (4, spec.encoders["m"].width)
    made = whole(x)
    torch.testing.assert_close(state.tokens.reshape(made.shape), made)


def test_what_passes_between_stages_by_hand() -> None:
    """Channels come last: 20 steps of 3, of 8, 10 steps (stride 2) of 10, and the answer."""
    assert [state_shape(spec_of("net"), "m", k) for k in range(4)] == [(20, 3), (20, 8), (10, 10), (1, 6)]
    assert [state_shape(spec_of("picture"), "m", k) for k in range(3)] == [(48, 3), (48, 4), (12, 8)]


def test_first_weights_are_the_modules_own() -> None:
    class Filled(Plain):
        def __init__(self) -> None:
            super().__init__()
            nn.init.constant_(self.one.weight, 0.25)

    kind = edgefl.encoder(Filled, input_shape=(20, 3), stages=[["one"], ["two"]])
    model = build(ModelSpec({"m": encoder_of_size(name_of(kind), "tiny", (20, 3))}, 2), seed=1)
    assert (tensors_of(model)["one.weight"] == 0.25).all()
    other = build(model.spec, seed=2)
    assert not torch.equal(tensors_of(model)["two.weight"], tensors_of(other)["two.weight"])


def real_step(made: Job, rows: int) -> tuple[float, int]:
    """(FLOPs, peak of live bytes) of the second of two steps on the CPU."""
    with LiveBytes() as live:
        x = torch.randn(rows, *made.model.encoders["m"].input_shape)
        batch = Batch(rows, {"m": x}, {"m": None}, torch.arange(rows) % 3)
        model = build(made.model, made.stage.present)
        prepare(model, made.stage.trained)
        optimizer = make_optimizer(model, made.stage.trained, made.hyper)
        train_step(model, made, batch, optimizer, Auxiliary({}))
        with FlopCounter() as counter:
            train_step(model, made, batch, optimizer, Auxiliary({}))
    return float(counter.flops), live.peak


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", ["layerwise", "end_to_end"])
def test_each_stage_costs_what_is_predicted_on_shapes_alone(name: str, schedule: str) -> None:
    spec = spec_of(name)
    for stage in stages_of(spec, schedule):
        made = with_hyper(job(spec, stage), batch_size=96, clip_norm=1.0)  # all gradients are there at once
        flops, peak = real_step(made, 96)
        price = price_step(made, {"m": 96})
        assert price.flops == flops > 0
        assert peak == pytest.approx(price.peak, rel=0.05)


def samples(rows: int = 12, shape: tuple[int, ...] = (20, 3)) -> Dataset:
    values = np.random.default_rng(0).normal(size=(rows, *shape)).astype(np.float32)
    here, ids = np.ones(rows, bool), list(map(str, range(rows)))
    return Dataset({"m": values}, {"m": here}, np.arange(rows) % 3, ("x", "y", "z"), ids)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_frozen_stages_make_is_stored_in_its_own_shape(stage: int, tmp_path: Path) -> None:
    spec = spec_of("net")
    made = with_hyper(job(spec, stages_of(spec)[stage]), batch_size=6)
    cached = with_cache(made, "f32")
    shape = state_shape(spec, "m", stage)
    assert prefixes(cached)["m"][2:4] == shape
    assert prefixes(cached)["m"].most == 20 * 8  # after stage 1, the most of all
    plain, stored = (
        train_round(one, samples(), parts_of(one), LocalState(cache=PrefixCache(tmp_path)), salt="x")
        for one in (made, cached)
    )
    for part, tensors in plain.parts.items():
        for name, value in tensors.items():
            np.testing.assert_allclose(stored.parts[part][name], value, atol=1e-5, err_msg=f"{part} {name}")


def test_low_rank_terms_adapt_its_linear_layers() -> None:
    spec = spec_of("net", lora=LoraSpec(rank=2, parts=("m/stage3",)))
    model = build(spec).eval()
    assert [name for name in part_tensors(model, "lora/m/stage3") if name.endswith(".A")] == ["blocks.0.stage.out.A"]
    x = torch.randn(2, 20, 3)
    before = model.encode("m", x)
    with torch.no_grad():
        model.part("lora/m/stage3").get_parameter("blocks.0.stage.out.B").fill_(1.0)
    assert not torch.equal(model.encode("m", x), before)


FLEET = [{"name": "one"}, {"name": "two"}]
N = 72


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_kinds, "_GIVEN", {})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, labels = np.random.default_rng(1), np.arange(N) % 3
    waves = np.sin(np.arange(20)[None, :, None] * (1 + labels[:, None, None]) / 3) + rng.normal(0, 0.1, (N, 20, 3))
    Dataset(
        {"acc": waves.astype(np.float32), "gyro": waves.astype(np.float32)},
        {m: np.ones(N, bool) for m in ("acc", "gyro")},
        labels,
        ("x", "y", "z"),
        list(map(str, range(N))),
    ).save_npz(path := tmp_path_factory.mktemp("own") / "all.npz")
    return path


def fields(source: Path, kind: object, **model: object) -> dict[str, Any]:
    other = {"kind": "sensor", "width": 8, "depth": 3, "heads": 2, "patch": 4}
    return {
        "name": "own",
        "recipe": "lw-fedmml",
        "data": {"source": source},
        "model": {"stages": 3, "encoders": {"acc": kind, "gyro": other}, "head": {"width": 12, "out": 8}, **model},
        "training": {"rounds": [1, 1, 2], "batch_size": 8},
        "fleet": FLEET,
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_it_trains_by_stages_in_a_fleet_and_is_exported(source: Path, tmp_path: Path) -> None:
    own = fields(source, kind_of_net())
    run = edgefl.run(own, directory=tmp_path, in_process=True, page=False, export=False)
    with pytest.MonkeyPatch.context() as patch:  # as another program knows it
        patch.setattr(encoder_kinds, "_GIVEN", {})
        with pytest.raises(ExportError, match="encoder kind 'Net' is unknown") as told:
            final_state(run.directory)
    assert f"edgefl.run(…, in_process=True, resume='{run.id}')" in told.value.remedy
    run = edgefl.run(own, directory=tmp_path, in_process=True, page=False, resume=run.id)
    with Ledger(run.directory / LEDGER, create=False) as ledger:
        states = ledger.states(run.id)
    ends = [states[max(key for key in states if key[0] == stage)] for stage in (1, 2, 3)]
    for frozen, trained in ((1, 1), (2, 2)):  # once trained, to the end the same object, running means included
        ids = [end[f"acc/stage{frozen}"].id for end in ends]
        assert ids[trained - 1 :] == [ids[-1]] * (4 - trained)
    assert len({end["acc/norm"].id for end in ends}) == 3
    rows = [row for row in run.report.record.assignments if row.status == "done"]
    assert len(rows) == 8
    for row in rows:
        for figure in ("payload_up_bytes", "flops"):
            assert row.measured[figure].value == row.predicted[figure].value, (row.stage, figure)
        assert row.measured["payload_down_bytes"].value <= row.predicted["payload_down_bytes"].value
    index = json.loads((run.directory / "bundles" / "index.json").read_text())
    assert {row["name"] for row in index["bundles"]} == {"acc", "gyro", "acc+gyro"}
    assert max(row["max_difference"] for row in index["bundles"]) < 1e-4
    assert b"GRU" in (run.bundles["acc"] / "model.onnx").read_bytes()  # one operation, not twenty steps
    answer = run.load_bundle().predict({"acc": np.zeros((2, 20, 3), np.float32)})
    assert len(answer.labels) == 2


def test_processes_know_nothing_of_it_and_the_error_says_what_to_do(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.encoders\.acc\.kind: is a kind of encoder of this process") as told:
        edgefl.run(fields(source, kind_of_net()), directory=tmp_path)
    assert "in_process=True" in told.value.remedy
    assert "edgefl.encoders" in told.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_study_cannot_tell_it_from_another_of_its_name(source: Path) -> None:
    """A cell's run is found by a hash of its run file, which has the class's name alone."""
    with pytest.raises(ConfigError, match="a study cannot tell from another of its name"):
        planned(Work(fields(source, kind_of_net())), {"seed": 1})


def test_a_kind_has_one_name_and_another_of_the_same_class_another() -> None:
    one, two = kind_of_net(), kind_of_net()
    assert name_of(one) == name_of(one) != name_of(two)
    assert given_here(name_of(one))
    assert encoder_kind(name_of(two)) is two
    assert name_of(encoder_kind("sensor")) == "sensor"
    assert not given_here("sensor")


class Skips(Plain):
    def forward(self, x: Tensor) -> Any:
        one = self.one(x)
        return self.two(one.tanh() * one.shape[1]).mean(1) + one.mean(1)


class Branches(Plain):
    def between(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Asks(Plain):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Fixed(Plain):
    def between(self, x: Tensor) -> Tensor:
        return x.reshape(2, 20, 4)


class Several(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.two(self.one(x)), x


class Wide(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.two(self.one(x))[:, :, :, None]


class Idle(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.one(x)


class Backwards(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.one(self.two(torch.cat((x, x[:, :, :1]), dim=2))[:, :, :3])


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Any:
        return self.two(self.one(F.pad(x, (0, 1))))


class Projected(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, proj_size=2, batch_first=True)


class Reads(Plain):
    def __init__(self) -> None:
        super().__init__()
        Path("no such file").read_text()


class Needs(Plain):
    def __init__(self, width: int) -> None:
        super().__init__()


REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    "no such child": (Plain, [["one"], ["three"]], "stage 2 names 'three', which it has not", "one, two"),
    "in no stage": (Plain, [["one"]], "'two.weight' is in no stage", "Name 'two'"),
    "in two stages": (Plain, [["one"], ["one", "two"]], "'one' is in two places", "once"),
    "an empty stage": (Plain, [["one", "two"], []], "stage 2 is empty", "Name the children"),
    "another order": (Backwards, [["one"], ["two"]], "forward calls 'one' of stage 1 after stage 2", "in the order"),
    "never called": (Idle, [["one"], ["two"]], "forward never calls 'two'", "Leave it out"),
    "two values pass": (Skips, [["one"], ["two"]], "behind stage 1 its forward pass reads 2 values", "one stage"),
    "asks for values": (Branches, [["one"], ["two"]], "its forward pass cannot be cut", "leave stages out"),
    "asks for values, whole": (Branches, None, "its forward pass ends with", "planned on shapes alone"),
    "asks for the mode": (Asks, [["one"], ["two"]], "reads self.training", "nn.Dropout"),
    "a fixed batch": (Fixed, None, "its forward pass ends with", "fix a batch size"),
    "several tensors": (Several, None, "it returns tuple", "Return one tensor"),
    "too many axes": (Wide, None, "it returns [batch, 20, 4, 1]", "[batch, tokens, width]"),
    "tied": (Tied, [["one"], ["two"]], "'one.weight' and 'two.weight' are one tensor", "one stage"),
    "a projected LSTM": (Projected, None, "it has an LSTM with proj_size", "Linear"),
    "a file that is not there": (Reads, None, "its factory ends with FileNotFoundError", "takes no arguments"),
    "arguments": (Needs, None, "its factory ends with TypeError", "takes no arguments"),
    "no module": (dict, None, "its factory returns a dict", "nn.Module"),
    "no name": (nn.Linear(3, 4), None, "is no class or function", "class or function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_module_that_cannot_be_used_is_refused_where_it_is_given(case: str) -> None:
    factory, stages, why, remedy = REFUSED[case]
    with pytest.raises(ModelError) as told:
        edgefl.encoder(factory, input_shape=(20, 3), stages=stages)
    assert why in told.value.message
    assert remedy in told.value.remedy


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"width": 7}, "width: is 7, that of"),
        ({"depth": 6}, "depth: is 6, that of"),
        ({"dropout": 0.5}, "dropout: is 0.5, which"),
        ({"input_shape": (20, 4)}, "input_shape: [20, 4]: module"),
    ],
)
def test_a_run_file_cannot_change_what_the_module_settles(changes: dict[str, Any], why: str) -> None:
    spec = spec_of("net")
    encoder = structs.replace(spec.encoders["m"], **changes)
    problems = [str(one) for one in spec_problems(structs.replace(spec, encoders={"m": encoder}))]
    assert any(why in problem for problem in problems)


def test_more_stages_than_it_has_and_what_needs_tokens_of_one_width_are_faults() -> None:
    spec = spec_of("net")
    (problem,) = spec_problems(structs.replace(spec, stages=2))
    assert "name 2 stages of it in edgefl.encoder, or set model.stages to a divisor" in problem.message
    for changes, path in (({"fusion": "joint"}, "fusion"), ({"encoder_sharing": "multiway"}, "encoder_sharing")):
        assert path in [problem.path for problem in spec_problems(structs.replace(spec, **changes))]


class Draws(Plain):
    def between(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Mixes(Plain):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Foreign(Plain):
    def between(self, x: Tensor) -> Tensor:
        return torch.linalg.pinv(x).transpose(1, 2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("factory", "why"),
    [(Draws, "another answer the second time"), (Mixes, "depends on the others"), (Foreign, "exported to ONNX")],
)
def test_what_only_values_show_is_refused_before_anything_trains(
    factory: Any, why: str, source: Path, tmp_path: Path
) -> None:
    kind = edgefl.encoder(factory, input_shape=(20, 3))
    asked = fields(source, kind, stages=1)
    asked["training"]["rounds"] = [2]
    for call in (lambda: edgefl.plan_run(asked), lambda: edgefl.run(asked, directory=tmp_path, in_process=True)):
        with pytest.raises(EdgeFLError, match=rf"modality 'acc', encoder {factory.__name__}\S*: .*{why}"):
            call()
    assert list(tmp_path.iterdir()) == []
