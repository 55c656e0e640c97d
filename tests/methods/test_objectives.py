"""Terms of the loss and stand-ins for absent modalities, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from hypothesis import given
from hypothesis import strategies as st
from losses_fixture import term
from training_fixture import (
    CONTRAST,
    job,
    model_spec,
    random_batch,
)

from edgefl.methods.fedmml.clip import clip_loss
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Job
from edgefl.prototypes.mask import TEMPERATURE, Table
from edgefl.registry import methods
from edgefl.training.fill import hide
from edgefl.training.forward import Auxiliary, Forward
from edgefl.training.step import prepare, total_loss

ORACLES = {
    case["id"]: case for case in json.loads((Path(__file__).parents[1] / "oracles/oracles.json").read_text())["cases"]
}


def ready(made: Job, seed: int = 0) -> StagedModel:
    """A model with random parts, its buffers off their first values, prepared to train."""
    model = build(made.model, made.stage.present, seed=seed)
    torch.manual_seed(7)
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    prepare(model, made.stage.trained)
    return model


def forward_of(projected, rows=None, labels=None, tables=None, missing=("zero", {}), size=None) -> Forward:
    spec = model_spec(modalities="".join(["a", "b"]))
    size = size or len(next(iter(projected.values())))
    rows = {m: (rows or {}).get(m) for m in projected}
    return Forward(
        build(spec, device="meta"), size, projected, projected, rows, labels, missing, Auxiliary(tables or {})
    )


def table(rows, valid=None) -> Table:
    rows = torch.tensor(rows)
    return Table(rows, torch.ones(len(rows), dtype=torch.bool) if valid is None else torch.tensor(valid))


# ---- losses


@pytest.mark.parametrize("case", ["clip-1", "clip-2", "clip-3", "clip-4"])
def test_clip_loss_by_hand(case):
    given_ = ORACLES[case]["inputs"]
    z_a, z_b = (torch.tensor(given_[name], dtype=torch.float64) for name in ("z_a", "z_b"))
    assert clip_loss(z_a, z_b, given_["temperature"]).item() == pytest.approx(ORACLES[case]["expect"], abs=1e-6)


@given(st.integers(2, 6), st.integers(0, 1000))
def test_clip_loss_does_not_care_which_modality_is_first_nor_about_the_order_of_samples(size, seed):
    generator = torch.Generator().manual_seed(seed)
    z_a, z_b = (F.normalize(torch.randn(size, 4, generator=generator).double(), dim=1) for _ in range(2))
    loss = clip_loss(z_a, z_b, 0.5)
    order = torch.randperm(size, generator=generator)
    torch.testing.assert_close(loss, clip_loss(z_b, z_a, 0.5))
    torch.testing.assert_close(loss, clip_loss(z_a[order], z_b[order], 0.5))


def test_clip_is_over_the_samples_that_have_both():
    z = {m: torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i, m in enumerate("ab")}
    rows = {"a": torch.tensor([0, 1, 3, 4]), "b": torch.tensor([1, 2, 4, 5])}
    loss = term("clip", forward_of(z, rows, size=6), {"temperature": 0.5})
    both = clip_loss(F.normalize(z["a"][[1, 3]], dim=1), F.normalize(z["b"][[0, 2]], dim=1), 0.5)
    torch.testing.assert_close(loss, both)
    alone = {"a": z["a"].requires_grad_()}
    zero = term("clip", forward_of(alone), {"temperature": 0.5})
    zero.backward()  # one modality: no term, and still a graph
    assert zero.item() == 0


def test_cross_entropy_is_torchs_over_the_labelled_samples():
    made = job()
    model, batch = ready(made), random_batch()
    labels = batch.labels.clone()
    labels[1] = -1
    projected = {m: model.project(m, model.encode(m, x)) for m, x in batch.inputs.items()}
    forward = Forward(model, 6, projected, projected, batch.rows, labels, ("zero", {}))
    loss = term("cross_entropy", forward, {})
    logits = model.classify(model.fuse(projected))
    known = labels >= 0
    torch.testing.assert_close(loss, F.cross_entropy(logits[known], labels[known]))
    torch.testing.assert_close(forward.logits, logits)


def test_cross_entropy_of_several_labels_is_the_sum_of_binary_ones_by_hand():
    forward = forward_of({"a": torch.zeros(3, 6)}, labels=torch.tensor([0, -1, 0]))
    sets = torch.tensor([[1.0, 1, 0], [0, 0, 0], [0, 0, 0]])
    object.__setattr__(forward, "sets", sets)
    forward.__dict__["logits"] = torch.tensor([[2.0, 0, 0], [9, 9, 9], [0, 0, -2]])
    # -ln s(2) - 2 ln s(0), and 2 ln 2 + ln(1 + e^-2) for the third; the second is not known
    one = math.log(1 + math.exp(-2)) + 2 * math.log(2)
    assert term("cross_entropy", forward, {}).item() == pytest.approx(one, abs=1e-6)


def test_modality_contrast_by_hand():
    # two classes at 90 degrees, τ = 0.5: logits 1/0.5 = 2 and 0, so the loss of a perfect match is log(1 + e^-2)
    tables = {"a": table([[3.0, 0.0], [0.0, 0.5]]), "b": table([[1.0, 0.0], [0.0, 1.0]])}
    a = torch.tensor([[2.0, 0.0], [0.0, 7.0]])
    labels = torch.tensor([0, 1])
    perfect = math.log(1 + math.exp(-2))
    forward = forward_of({"a": a}, labels=labels, tables=tables)
    assert term("modality_contrast", forward, {"temperature": 0.5}).item() == pytest.approx(perfect)
    # b: one row, belonging to sample 1, that matches class 0: log(1 + e^2). Mean over the two modalities.
    b = torch.tensor([[1.0, 0.0]])
    forward = forward_of({"a": a, "b": b}, {"b": torch.tensor([1])}, labels, tables)
    wrong = math.log(1 + math.exp(2))
    assert term("modality_contrast", forward, {"temperature": 0.5}).item() == pytest.approx((perfect + wrong) / 2)


def test_modality_contrast_leaves_out_classes_without_a_prototype_and_samples_without_a_label():
    tables = {"a": table([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]], [True, True, False])}
    a = torch.tensor([[2.0, 0.0], [5.0, 5.0], [0.0, 3.0]], requires_grad=True)
    labels = torch.tensor([0, 2, -1])
    loss = term("modality_contrast", forward_of({"a": a}, labels=labels, tables=tables), {"temperature": 0.5})
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-2)))
    loss.backward()
    assert torch.isfinite(a.grad).all()
    assert (a.grad[1:] == 0).all()


@pytest.mark.parametrize("valid", [[False, False], [True, False]])
def test_modality_contrast_without_anything_to_match_is_zero_and_finite(valid):
    a = torch.zeros(2, 2, requires_grad=True)  # a flat sensor: batch norm makes every row zero
    tables = {"a": table([[0.0, 0.0], [1.0, 1.0]], valid)}
    labels = torch.tensor([1, 1]) if not valid[0] else torch.tensor([0, 0])
    loss = term("modality_contrast", forward_of({"a": a}, labels=labels, tables=tables), {"temperature": 0.5})
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(a.grad).all()
    assert term("modality_contrast", forward_of({"a": a}, labels=labels), {"temperature": 0.5}).item() == 0


def test_the_total_is_the_weighted_sum_of_its_terms():
    made = job(objective=CONTRAST)
    model, batch = ready(made), random_batch()
    tables = {m: Table(torch.randn(3, 6), torch.ones(3, dtype=torch.bool)) for m in "ab"}
    projected = {m: model.project(m, model.encode(m, x)) for m, x in batch.inputs.items()}
    forward = Forward(model, 6, projected, projected, batch.rows, batch.labels, ("zero", {}), Auxiliary(tables))
    options = {"cross_entropy": {"weight": 2.0}, "modality_contrast": {"weight": 0.5, "temperature": 0.1}}
    expected = 2 * term("cross_entropy", forward, {}) + 0.5 * term("modality_contrast", forward, {"temperature": 0.1})
    torch.testing.assert_close(total_loss(forward, options), expected)


def with_heads(labels: list[int]) -> tuple[Forward, dict[str, torch.nn.Module]]:
    """A forward pass over six samples of both modalities, and other heads for the same encoders."""
    model, batch = ready(job()), random_batch()
    other = {m: build(model_spec(), seed=5).part(f"head/{m}").eval() for m in "ab"}
    encoded = {m: model.encode(m, x) for m, x in batch.inputs.items()}
    projected = {m: model.project(m, h) for m, h in encoded.items()}
    return Forward(model, 6, encoded, projected, batch.rows, torch.tensor(labels), ("zero", {})), other


def test_the_task_of_the_private_copies_is_over_the_labelled_samples_of_every_class():
    forward, twins = with_heads([0, 1, -1, 2, 0, -1])
    known = forward.labels >= 0
    logits = forward.model.classify(forward.model.fuse({m: twins[m](h) for m, h in forward.encoded.items()}))
    expected = F.cross_entropy(logits[known], forward.labels[known])
    forward = replace(forward, auxiliary=Auxiliary(private_heads=twins))
    torch.testing.assert_close(term("cluster_contrast", forward, {"temperature": 0.5}), expected)


def test_the_regulariser_is_over_both_heads_and_their_private_copies_by_hand():
    forward, twins = with_heads([0, 1, 2, 0, 1, 2])
    forward = replace(forward, auxiliary=Auxiliary(private_heads=twins))
    expected = sum(
        ((parameter - anchor) ** 2).sum()
        for m in "ab"
        for parameter, anchor in zip(forward.model.part(f"head/{m}").parameters(), twins[m].parameters(), strict=True)
    )
    assert expected > 0
    torch.testing.assert_close(term("regulariser", forward, {}), expected)
    assert term("regulariser", replace(forward, auxiliary=Auxiliary()), {}).item() == 0


def test_ram_follows_as_unit_vectors_the_modalities_that_classify_a_labelled_sample_better():
    spec = msgspec.structs.replace(model_spec(), fusion="mean")
    model, batch = ready(job(spec)), random_batch()
    encoded = {m: model.encode(m, x) for m, x in batch.inputs.items()}
    projected = {m: 3 * model.project(m, h) for m, h in encoded.items()}
    labels = torch.tensor([0, 1, -1, 2, 0, 1])
    forward = Forward(model, 6, encoded, projected, batch.rows, labels, ("zero", {}))
    joint = F.normalize(model.fuse(projected), dim=1)
    expected, counted = torch.zeros(()), 0
    for e in (F.normalize(e, dim=1) for e in projected.values()):
        for row in (0, 1, 3, 4, 5):
            scores = [torch.log_softmax(model.classify(x), dim=1)[row, labels[row]] for x in (e, joint)]
            if scores[0] > scores[1]:
                counted += 1
                expected = expected + torch.linalg.vector_norm(joint[row] - e[row])
    assert 0 < counted < 10
    torch.testing.assert_close(term("ram", forward, {}), expected / 5)
    assert term("ram", replace(forward, labels=None), {}).item() == 0


def test_gmc_of_a_forward_pass_is_nt_xent_of_the_joint_with_each_projection():
    model, batch = ready(job(msgspec.structs.replace(model_spec(), fusion="mean"))), random_batch()
    encoded = {m: model.encode(m, x) for m, x in batch.inputs.items()}
    projected = {m: model.project(m, h) for m, h in encoded.items()}
    expected = torch.zeros(())
    for e in projected.values():
        z = F.normalize(torch.cat((model.fuse(projected), e)), dim=1)
        logits = (z @ z.T / 0.5).fill_diagonal_(-math.inf)
        expected = expected + F.cross_entropy(logits, torch.arange(12).roll(6))
    forward = Forward(model, 6, encoded, projected, batch.rows, batch.labels, ("zero", {}))
    torch.testing.assert_close(term("gmc", forward, {"temperature": 0.5}), expected)


# ---- stand-ins


def filled(kind, options=None, tables=None, labels=None):
    projected = {"a": torch.ones(3, 6), "b": torch.full((1, 6), 5.0)}
    forward = forward_of(projected, {"b": torch.tensor([1])}, labels, tables, (kind, options or {}))
    return forward.filled.values


def test_zeros_and_noise_stand_in_where_a_sample_lacks_the_modality():
    for kind in ("zero", "ignore"):
        result = filled(kind)
        assert result["b"].tolist() == [[0.0] * 6, [5.0] * 6, [0.0] * 6]
        assert result["a"].tolist() == [[1.0] * 6] * 3
    torch.manual_seed(1)
    noise = filled("random")["b"]
    assert len(set(noise[[0, 2]].flatten().tolist())) == 12
    assert noise[1].tolist() == [5.0] * 6
    big = forward_of({"a": torch.ones(500, 6)}, missing=("random", {})).filled.values["b"]
    assert big.mean().item() == pytest.approx(0, abs=0.1)
    assert big.std().item() == pytest.approx(1, abs=0.1)


def test_the_prototype_of_the_own_class_stands_in_and_zeros_without_a_label_or_a_table():
    tables = {"b": table([[float(c)] * 6 for c in (10, 20, 30)])}
    result = filled("prototype", tables=tables, labels=torch.tensor([2, 0, -1]))
    assert result["b"][:, 0].tolist() == [30.0, 5.0, 0.0]
    assert filled("prototype", labels=torch.tensor([2, 0, 1]))["b"][:, 0].tolist() == [0.0, 5.0, 0.0]
    assert filled("prototype", tables=tables)["b"][:, 0].tolist() == [0.0, 5.0, 0.0]


def test_the_prototypes_that_the_modality_at_hand_matches_stand_in():
    # a = (1, …, 1) matches class 1 with cosine 1 and class 0 with cosine 1 - T: weights e : 1
    own = torch.ones(3, 6)
    own[0, 0] += 6 * math.sqrt(2 * TEMPERATURE / 5)
    cosine = own[0].sum() / (own[0].norm() * math.sqrt(6))
    tables = {"a": Table(own, torch.tensor([True, True, False])), "b": table([[float(c)] * 6 for c in (10, 20, 30)])}
    result = filled("prototype", {"by": "match"}, tables, torch.tensor([0, 0, 0]))
    less = math.exp((cosine - 1) / TEMPERATURE)
    assert 0.1 < less < 0.9
    expected = (20 + 10 * less) / (1 + less)
    assert result["b"][0].tolist() == pytest.approx([expected] * 6, rel=1e-4)
    assert result["b"][1].tolist() == [5.0] * 6


@pytest.mark.parametrize("kind", [kind for kind in methods("missing") if kind != "reconstruction"])
def test_a_modality_that_nobody_in_the_batch_has_is_filled_whole(kind):
    forward = forward_of({"a": torch.ones(3, 6)}, labels=torch.tensor([0, 1, 2]), missing=(kind, {}))
    result = forward.filled.values
    assert list(result) == ["a", "b"]
    assert result["b"].shape == (3, 6)


def test_hidden_modalities_leave_each_sample_one():
    torch.manual_seed(0)
    has = {"a": torch.tensor([True] * 400), "b": torch.tensor([True] * 300 + [False] * 100)}
    hidden = hide(has, 0.5)
    assert (hidden["a"] | hidden["b"]).all()
    assert hidden["a"][300:].all()  # incomplete samples keep what they have
    lost = int((~(hidden["a"] & hidden["b"]))[:300].sum())
    assert 120 < lost < 180
    assert hide(has, 0.0)["b"].equal(has["b"])
