"""PmcmFL (arXiv 2312.13508) as printed: bounded fused vectors, prototypes of pairs, a closing round of all devices."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from memory_fleet import plan_of, run_fleet, share
from training_fixture import dataset, job, model_spec, parts_of, stages_of

from coordinator.core.round_rules import in_closing_round, is_buffered
from coordinator.core.state import State
from edgefl.methods.pmcmfl import contrast
from edgefl.methods.pmcmfl.contrast import prototype_contrast
from edgefl.models.parts import loaded
from edgefl.models.spec import HeadSpec, is_matcher
from edgefl.models.staged import build
from edgefl.plan.job import Job
from edgefl.plan.stages import with_closing
from edgefl.prototypes.mask import Table
from edgefl.prototypes.table import from_tensors
from edgefl.training.batches import make_batch
from edgefl.training.forward import auxiliary_of
from edgefl.training.local_round import train_round
from edgefl.training.step import run_forward

torch.set_num_threads(1)


# ---- fused vectors (P3)


@torch.no_grad()
def test_the_bounded_fusion_by_hand():
    """The MLP gives (1, 3): layer norm (-1, 1) but for its epsilon of 1e-5, halved (-.5, .5), tanh (-.462117, .462117).

    Against prototypes that are f and -f, eq. 7's logits at temperature 1 are +-2 * .462117^2 = +-.427104, so that the
    loss is log(1 + e^-.854208) = .354607.
    """
    spec = msgspec.structs.replace(model_spec(), head=HeadSpec(8, 1), fusion_width=2, bounded=True)
    model = build(spec, ["fusion"])
    fusion = model.part("fusion")
    for parameter in fusion[:3].parameters():
        parameter.zero_()
    fusion[2].bias.copy_(torch.tensor([1.0, 3]))
    f = model.fuse({"a": torch.ones(1, 1), "b": torch.ones(1, 1)})
    torch.testing.assert_close(f, torch.tensor([[-0.462117, 0.462117]]), atol=5e-6, rtol=0)
    rows = torch.cat((f, -f)).double()
    table = Table(rows, torch.ones(2, dtype=torch.bool))
    loss = prototype_contrast(rows, table, torch.tensor([0, 1]), 1.0)
    assert float(loss) == pytest.approx(0.354607, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("bounded", [True, False])
def test_what_the_contrast_sees_is_below_one_however_large_the_projections(bounded: bool):
    model = build(msgspec.structs.replace(model_spec(), bounded=bounded), ["fusion"])
    r = 1e4 * torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    assert (float(model.fuse({"a": r, "b": -r}).abs().max()) < 1) is bounded


def test_the_recipe_bounds_its_fusion_and_others_do_not(tmp_path: Path):
    assert plan_of(tmp_path, "pmcmfl", "ab", 2, []).model.bounded
    assert not plan_of(tmp_path, "pmcmfl", "ab", 2, ["slots.fusion=concat"]).model.bounded
    assert not plan_of(tmp_path, "lw-prototypes", "ab", 2, []).model.bounded


# ---- prototypes of pairs (P4)


@pytest.mark.parametrize("which", ["all", "pairs"])
def test_prototypes_of_pairs_leave_samples_with_one_modality_out(which: str):
    """Of 18 samples, six a class, the first three lack b: one of each class, so that five a class are pairs."""
    made = job(prototypes={"class_mean": {"from": which, "min_count": 1.0}}, lr={"encoder": 0.0, "head": 0.0})
    data = dataset(18, {"b": [0, 1, 2]})
    tables = from_tensors(train_round(made, data, parts_of(made)).parts["prototypes"])
    assert tables["a"].counts.tolist() == [6, 6, 6] if which == "all" else [5, 5, 5]
    assert tables["b"].counts.tolist() == tables["fused"].counts.tolist() == [5, 5, 5]


# ---- the closing round (P5)


def closing_job(matching: str = "classifier", **changes):
    spec = msgspec.structs.replace(model_spec(), matching=matching)
    stage = with_closing(spec, stages_of(spec, "end_to_end"))[-1]
    return job(spec, stage, prototypes={"class_mean": {"match": matching}}, **changes)


@pytest.mark.parametrize("matching", ["classifier", "prior"])
def test_the_closing_round_trains_and_sends_only_networks_that_match(matching: str):
    made = closing_job(matching)
    parts = parts_of(made)
    done = train_round(made, dataset(24, {"b": [0, 1]}), parts)
    assert set(done.parts) == {"match/a", "match/b"} == set(done.samples)
    counts = {"classifier": {"match/a": 24, "match/b": 22}, "prior": {"match/a": 22, "match/b": 22}}
    assert done.samples == counts[matching]
    assert all(np.abs(done.parts[p][name] - parts[p][name]).max() > 0 for p in done.parts for name in done.parts[p])
    assert done.kept == {}


def test_what_was_learned_in_the_closing_round_finds_the_class():
    made = closing_job()
    data, parts = dataset(60), parts_of(closing_job())
    small = train_round(made, data, parts).parts["match/a"]
    model = build(made.model, ["a/embed", "a/stage1", "a/stage2", "a/stage3", "a/norm", "head/a", "match/a"]).eval()
    from edgefl.models.parts import load_part

    for name in model.parts_present:
        load_part(model, name, small if name == "match/a" else parts[name])
    with torch.no_grad():
        r = model.project("a", model.encode("a", torch.from_numpy(data.modalities["a"])))
        assert float((model.match("a", r).argmax(1).numpy() == data.labels).mean()) > 0.5


def test_every_device_is_asked_and_waited_for_in_the_closing_round_even_without_lockstep(tmp_path: Path):
    overrides = ["rounds=async", "slots.select=all", "round.buffer=1"]
    plan = plan_of(tmp_path, "pmcmfl", "ab", 3, overrides)
    state = State(plan)
    assert state.rounds == (2, 1)
    training, closing = (msgspec.structs.replace(state, stage=stage) for stage in (1, 2))
    assert (in_closing_round(training), in_closing_round(closing)) == (False, True)
    assert (is_buffered(training), is_buffered(closing)) == (True, False)
    own = {name: share(30, {"a": 1.0, "b": 0.7}, seed=seed) for seed, name in enumerate("uvw")}
    report = run_fleet(tmp_path, plan, own)
    assert report.rounds[-1].stage == 2
    assert sorted(report.rounds[-1].participants) == ["u", "v", "w"]


def test_without_networks_that_match_there_is_no_closing_round(tmp_path: Path):
    plan = plan_of(tmp_path, "pmcmfl", "ab", 3, ["slots.prototypes={class_mean: {match: cosine}}"])
    assert [stage.rounds for stage in plan.stages] == [2]
    assert not in_closing_round(State(plan, stage=1))
    assert not any(is_matcher(part) for stage in plan.stages for part in stage.present)


def test_the_plan_prices_the_closing_round_and_the_report_names_it(tmp_path: Path):
    from edgefl.report.price_tables import _trains
    from edgefl.report.rounds import stages

    plan = plan_of(tmp_path, "pmcmfl", "ab", 2, ["slots.select=all"])
    own = {"u": share(30, {"a": 1.0, "b": 1.0}, seed=1), "v": share(30, {"a": 1.0, "b": 1.0}, seed=2)}
    report = run_fleet(tmp_path, plan, own)
    last = [row for row in report.assignments if row.stage == 2]
    assert sorted(row.device for row in last) == ["u", "v"]
    assert all(row.predicted["flops"].value > 0 for row in last)
    told = [str(cell) for row in stages(report).rows for cell in row]
    assert any("closing round" in cell for cell in told)
    assert _trains(_placement(plan)) == "matching networks (closing round)"


def _placement(plan):
    from edgefl.plan.job import Placement

    return Placement(device="u", stage=plan.stages[-1])


# ---- stand-ins before there are prototypes

OF_CLASS = {"missing": {"prototype": {"by": "label"}}, "objective": {"cross_entropy": {}, "prototype_contrast": {}}}
LACKING = dataset(9, {"b": [0, 1, 2, 3, 4]})


def _first_batch(made, data, parts=None):
    """The forward pass of all samples as a device begins its round."""
    parts = parts or parts_of(made)
    model = loaded(made.model, made.stage.present, parts)
    batch = make_batch(data, np.arange(len(data)), ["a", "b"], torch.device("cpu"))
    return run_forward(model, made, batch, auxiliary_of(made, model, parts, {})).forward


def test_prototypes_may_begin_as_gaussian_ones_the_same_on_every_device():
    made = job(prototypes={"class_mean": {"start": "gaussian"}}, seed=3, **OF_CLASS)
    other = dataset(9, {"b": list(range(9))}, seed=5)
    initial = _first_batch(made, LACKING).auxiliary.initial
    drawn = initial["b"].rows
    assert set(initial) == {"a", "b"}
    assert not torch.equal(drawn, initial["a"].rows)
    for data in (LACKING, other):
        done = _first_batch(made, data)
        absent = torch.from_numpy(~data.has("b"))
        assert torch.equal(done.filled.values["b"][absent], drawn[torch.from_numpy(data.labels)][absent])
        assert (
            contrast.fused_loss(done, temperature=0.07, negatives="samples") == 0
        )  # equation 7 is of the second round
    again = msgspec.structs.replace(made, hyper=msgspec.structs.replace(made.hyper, seed=4))
    assert not torch.equal(_first_batch(again, LACKING).auxiliary.initial["b"].rows, drawn)


def _started(start: str) -> Job:
    """Of so few samples that the default of ``min_count`` would keep every class."""
    return job(prototypes={"class_mean": {"start": start, "min_count": 2.0}}, **OF_CLASS)


def test_a_gaussian_start_ends_with_the_first_prototypes():
    plain, gaussian = (_started(start) for start in ("zeros", "gaussian"))
    first = train_round(plain, LACKING, parts_of(plain))
    drawn = train_round(gaussian, LACKING, parts_of(gaussian))
    assert not np.array_equal(first.parts["fusion"]["0.weight"], drawn.parts["fusion"]["0.weight"])
    assert _first_batch(plain, LACKING).filled.values["b"][0].abs().sum() == 0
    second = {**parts_of(plain), "prototypes": first.parts["prototypes"]}
    after = [train_round(made, LACKING, second).parts["fusion"]["0.weight"] for made in (plain, gaussian)]
    np.testing.assert_array_equal(*after)


def test_a_device_without_pairs_sends_no_prototypes():
    made = job(prototypes={"class_mean": {"from": "pairs", "min_count": 1.0}})
    assert "prototypes" not in train_round(made, dataset(18, {"b": list(range(18))}), parts_of(made)).parts
