"""AproMFL as its recipe has it: what each device trains, what that costs, and that each part of the method acts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from losses_fixture import term
from training_fixture import dataset, job, model_spec, parts_of, random_batch, stages_of

from edgefl.budget.fit import place
from edgefl.config.profiles import load_recipe
from edgefl.data.dataset import Dataset
from edgefl.models.staged import build
from edgefl.plan.job import Candidate, Job
from edgefl.plan.stages import exchange_of, restrict
from edgefl.pricing.round_price import Pricer
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.training.forward import auxiliary_of
from edgefl.training.local_round import LocalState, RoundResult, train_round
from edgefl.training.step import run_forward

RECIPE = load_recipe("apromfl")


def unlabelled(data: Dataset) -> Dataset:
    return replace(data, labels=None, label_names=())


DEVICES = {
    "names-a": dataset(24, {"b": list(range(24))}),
    "names-both": dataset(24),
    "patchy": dataset(24, {"b": list(range(0, 24, 2))}),
    "pairs": unlabelled(dataset(24)),
}


def made_for(device: str, without: str = "", dropped: tuple[str, ...] = ()) -> Job:
    """The job of the device as the planner places it, the term ``without`` at weight 0, those ``dropped`` not there."""
    spec = msgspec.structs.replace(model_spec(stages=2), fusion="mean")
    objective = {name: options for name, options in RECIPE.objective.items() if name not in dropped}
    objective |= {without: {**objective[without], "weight": 0.0}} if without else {}
    whole = job(spec, stages_of(spec, "heads")[-1], objective=objective, prototypes=RECIPE.prototypes)
    slots = msgspec.structs.replace(whole.slots, exchange=exchange_of(RECIPE.weight))
    data = DEVICES[device]
    candidate = Candidate(device, samples=data.samples(), class_counts=data.class_counts())
    placed = place(Job(spec, whole.stage, whole.hyper, slots), candidate, {}, Pricer())
    assert placed.refusal is None
    return msgspec.structs.replace(whole, stage=placed.stage, hyper=placed.hyper, slots=slots)


@cache
def second_round(device: str, without: str = "", dropped: tuple[str, ...] = ()) -> RoundResult:
    """A round that starts from prototypes, another mapping received, and what the round before left here."""
    made, data = made_for(device, without, dropped), DEVICES[device]
    first = train_round(made, data, parts_of(made), salt="1")
    parts = parts_of(made, seed=5)
    draw = np.random.default_rng(1)
    parts["prototypes"] = to_tensors(
        {m: ClassMeans(draw.normal(size=(10, 6)).astype(np.float32), np.ones(10, np.float32)) for m in "ab"}
    )
    return train_round(made, data, parts, LocalState(kept=first.kept), salt="2")


def weights(result: RoundResult) -> np.ndarray:
    """All that was trained of the mappings, in a row."""
    heads = [result.parts[f"head/{m}"] for m in "ab" if f"head/{m}" in result.parts]
    return np.concatenate([value.ravel() for head in heads for _, value in sorted(head.items())])


@pytest.mark.parametrize(
    ("device", "term"),
    [
        *((device, "prototype_transfer") for device in DEVICES),
        *((device, "model_transfer") for device in DEVICES),
        ("pairs", "regulariser"),
        ("pairs", "margin"),
        ("names-a", "cross_entropy"),
    ],
)
def test_a_term_changes_what_the_mappings_become(device, term):
    assert not np.array_equal(weights(second_round(device)), weights(second_round(device, without=term)))


def test_the_contrast_changes_the_private_copy_and_the_prototypes_that_are_sent():
    made, data = made_for("pairs"), DEVICES["pairs"]
    heavy = {**made.slots.objective, "cluster_contrast": {"weight": 1.0, "temperature": 0.5}}
    other = msgspec.structs.replace(made, slots=msgspec.structs.replace(made.slots, objective=heavy))
    one, two = (train_round(each, data, parts_of(each), salt="1") for each in (made, other))
    for m in "ab":
        assert any(not np.array_equal(v, two.kept[f"twin/{m}"][k]) for k, v in one.kept[f"twin/{m}"].items())
    assert not np.array_equal(one.parts["prototypes"]["a"], two.parts["prototypes"]["a"])


@pytest.mark.parametrize("device", DEVICES)
def test_only_a_device_without_labels_keeps_a_private_copy(device):
    copies = {part for part in second_round(device).kept if part.startswith("twin/")}
    assert copies == ({"twin/a", "twin/b"} if device == "pairs" else set())


@pytest.mark.parametrize("device", DEVICES)
def test_the_prediction_is_what_is_counted(device):
    assert Pricer()(made_for(device), DEVICES[device].samples()).flops == second_round(device).flops


@pytest.mark.parametrize("device", ["names-a", "names-both", "patchy"])
def test_a_labelled_device_pays_for_no_private_copy(device):
    counted = second_round(device).flops
    assert second_round(device, dropped=("cluster_contrast", "regulariser")).flops == counted


def test_a_device_of_few_samples_makes_fewer_clusters_so_that_some_can_be_sent():
    """24 samples in 20 clusters are 16 of one sample at least, and none below ``min_count`` is sent: 4 at most."""
    counts = second_round("pairs").parts["prototypes"]["a.count"]
    assert len(counts) == 4
    assert counts.max() >= 5


def forwarded(device: str, rows: dict[str, list[int]] | None, absent: str = ""):
    """A forward pass of the device's job over random samples, with the global prototypes [K, 6] of both modalities."""
    made = made_for(device)
    model = build(made.model, made.stage.present, seed=1)
    batch = random_batch(rows)
    inputs = {m: x for m, x in batch.inputs.items() if m != absent}
    batch = replace(batch, inputs=inputs, rows={m: batch.rows[m] for m in inputs})
    draw = np.random.default_rng(1)
    tables = {m: ClassMeans(draw.normal(size=(3, 6)).astype(np.float32), np.ones(3, np.float32)) for m in "ab"}
    parts = parts_of(made) | {"prototypes": to_tensors(tables)}
    return run_forward(model, made, batch, auxiliary_of(made, model, parts, {})).forward, tables


def by_hand(e: torch.Tensor, tables: dict[str, ClassMeans], temperature: float = 0.07) -> torch.Tensor:
    """Equations 7 and 8 for the one embedding of each row, written out."""
    q = {}
    for m, table in tables.items():
        cosine = torch.nn.functional.cosine_similarity(e[:, None], torch.from_numpy(table.means)[None], dim=2)
        q[m] = torch.exp(cosine / temperature) / torch.exp(cosine / temperature).sum(1, keepdim=True)
    middle = (q["a"] + q["b"]) / 2
    return sum(0.5 * (q[m] * torch.log(q[m] / middle)).sum(1) for m in "ab")


def test_equations_7_and_8_on_a_unimodal_device_of_a_run_of_two_modalities():
    forward, tables = forwarded("names-a", None, absent="b")
    loss = term("prototype_transfer", forward, RECIPE.objective["prototype_transfer"])
    assert loss.item() > 0.01
    torch.testing.assert_close(loss, by_hand(forward.projected["a"], tables).mean())
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for n, p in forward.model.part("head/a").named_parameters() if "weight" in n)


def test_equations_7_and_8_on_a_sample_of_one_modality_within_a_device_of_both():
    rows = [0, 2, 3]  # of six, these have b
    forward, tables = forwarded("patchy", {"b": rows})
    loss = term("prototype_transfer", forward, RECIPE.objective["prototype_transfer"])
    a, b = forward.spread[0]["a"], forward.projected["b"]
    pairs = []
    for place_, row in enumerate(rows):
        q = [
            torch.softmax(torch.nn.functional.cosine_similarity(e[None], torch.from_numpy(tables[m].means)) / 0.07, 0)
            for m, e in (("a", a[row]), ("b", b[place_]))
        ]
        middle = (q[0] + q[1]) / 2
        pairs.append(sum(0.5 * (each * (each / middle).log()).sum() for each in q))
    single = by_hand(a[[1, 4, 5]], tables)
    torch.testing.assert_close(loss, (torch.stack(pairs).sum() + single.sum()) / 6)


def test_a_device_without_labels_whose_array_says_minus_one_still_has_a_task_for_its_copy():
    """Its classifier is not trained, so its task is the margin: nu is not 0 / 0, nor is the copy's task nothing."""
    made = made_for("pairs")
    model = build(made.model, made.stage.present, seed=1)
    for part in model.parts_present:
        model.part(part).requires_grad_(part in made.stage.trained)
    batch = replace(random_batch(), labels=torch.full((6,), -1))
    kept = {f"twin/{m}": parts_of(made, seed=3)[f"head/{m}"] for m in "ab"}
    forward = run_forward(model, made, batch, auxiliary_of(made, model, parts_of(made, seed=4), kept)).forward
    assert term("cluster_contrast", forward, RECIPE.objective["cluster_contrast"]) > 0.1
    assert term("model_transfer", forward, RECIPE.objective["model_transfer"]) > 0


def test_the_planner_sees_a_device_without_labels_by_its_stage():
    assert "task" in made_for("names-a").stage.trained
    assert "task" not in made_for("pairs").stage.trained
    assert set(restrict(made_for("names-a").stage, ["a"]).trained) == {"head/a", "task"}
