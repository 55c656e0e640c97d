"""What every term owes to rows that lack a modality, and to the planner's meta device."""

from __future__ import annotations

import pytest
import torch

from edgefl.methods.apromfl.margin import margin
from edgefl.methods.apromfl.transfer import cluster_contrast, model_transfer, prototype_transfer, ratio
from edgefl.methods.fedmml.clip import clip
from edgefl.methods.fedmvp.joint_terms import mcm, ram
from edgefl.methods.gmc import gmc
from edgefl.methods.mmic.reconstruction import reconstruction
from edgefl.methods.pmcmfl.contrast import prototype_alignment, prototype_contrast
from edgefl.methods.terms import blank, masked, squared_distance
from edgefl.prototypes.mask import Table

torch.set_num_threads(1)


class Batch:
    """Five rows, modalities a, b and c; ``has``: a row lacks some, the last all."""

    def __init__(self, has=("11010", "11100", "01100"), device="cpu"):
        generator = torch.Generator().manual_seed(3)
        self.e, self.other, self.tables, self.ce = {}, {}, {}, {}
        for m in "abc":
            self.e[m], self.other[m], rows = (torch.randn(5, 4, generator=generator).to(device) for _ in range(3))
            self.tables[m] = Table(rows, torch.tensor([True, True, False, True, True], device=device))
            self.ce[m] = torch.rand(5, generator=generator).to(device)
        self.has = {m: torch.tensor([c == "1" for c in row], device=device) for m, row in zip("abc", has, strict=True)}
        self.joint = torch.randn(5, 4, generator=generator).to(device)
        self.ce_joint = torch.rand(5, generator=generator).to(device) + 0.4
        self.labels = torch.tensor([0, 1, 0, -1, -1], device=device)
        for leaf in (*self.e.values(), self.joint):
            leaf.requires_grad_()

    def reordered(self, order):
        for one in (self.e, self.other, self.ce, self.has):
            one.update({m: value[order] for m, value in one.items()})
        self.joint, self.ce_joint, self.labels = self.joint[order], self.ce_joint[order], self.labels[order]
        return self


TERMS = {
    "clip": lambda b: clip(b.e, b.has, 0.5),
    "margin": lambda b: margin(b.e, b.has),
    "prototype_contrast": lambda b: prototype_contrast(b.joint, b.tables["a"], b.labels),
    "prototype_contrast by class": lambda b: prototype_contrast(b.joint, b.tables["a"], b.labels, class_level=True),
    "prototype_alignment": lambda b: prototype_alignment(b.joint, b.tables["a"], b.labels),
    "cluster_contrast": lambda b: cluster_contrast(b.e, b.has, b.labels, 0.07),
    "prototype_transfer": lambda b: prototype_transfer(b.e, b.has, b.tables),
    "model_transfer": lambda b: model_transfer(b.e, b.other, b.has, ratio(b.ce_joint.sum(), b.ce_joint.mean())),
    "mcm": lambda b: mcm(b.joint, b.e, b.has, 0.07).mean(),
    "mcm as NT-Xent": lambda b: mcm(b.joint, b.e, b.has, 0.07, ntxent=True).mean(),
    "ram": lambda b: ram(b.joint, b.e, b.has, b.ce_joint, b.ce).mean(),
    "gmc": lambda b: gmc(b.joint, b.e, b.has),
    "reconstruction": lambda b: reconstruction(b.e, b.other, b.has),
}


def gradients(term, batch) -> list[torch.Tensor | None]:
    leaves = [*batch.e.values(), batch.joint]
    return list(torch.autograd.grad(TERMS[term](batch), leaves, allow_unused=True))


@pytest.mark.parametrize("term", TERMS)
def test_a_term_has_a_value_and_a_finite_gradient(term):
    assert TERMS[term](Batch()) != 0
    found = [g for g in gradients(term, Batch()) if g is not None]
    assert sum(g.abs().sum() for g in found) > 0
    assert all(torch.isfinite(g).all() for g in found)


@pytest.mark.parametrize("term", TERMS)
def test_what_stands_in_absent_rows_changes_neither_value_nor_gradient(term):
    plain, spoilt = Batch(), Batch()
    with torch.no_grad():
        for m in "abc":
            spoilt.e[m][~spoilt.has[m]] = spoilt.other[m][~spoilt.has[m]] = spoilt.ce[m][~spoilt.has[m]] = torch.nan
        spoilt.joint[-1] = torch.inf
    assert torch.equal(TERMS[term](plain), TERMS[term](spoilt))
    for before, after in zip(gradients(term, plain), gradients(term, spoilt), strict=True):
        assert (before is None and after is None) or torch.equal(before, after)


@pytest.mark.parametrize("term", TERMS)
def test_the_order_of_samples_does_not_matter(term):
    torch.testing.assert_close(TERMS[term](Batch().reordered([3, 1, 4, 0, 2])), TERMS[term](Batch()))


@pytest.mark.parametrize("term", TERMS)
def test_a_batch_in_which_nothing_is_real_costs_nothing(term):
    batch = Batch(has=("00000", "00000", "00000"))
    batch.labels = torch.full((5,), -1)
    assert TERMS[term](batch) == 0
    assert all(g is None or not g.any() for g in gradients(term, batch))


@pytest.mark.parametrize("term", TERMS)
def test_one_row_alone_gives_a_finite_number(term):
    batch = Batch(has=("01000", "01000", "00000"))
    assert torch.isfinite(TERMS[term](batch))
    assert all(g is None or torch.isfinite(g).all() for g in gradients(term, batch))
    if term in ("clip", "mcm", "mcm as NT-Xent"):
        assert TERMS[term](batch) == 0


def test_one_modality_alone_costs_no_term_of_pairs_but_can_be_differentiated():
    batch = Batch()
    for loss in (clip({"a": batch.e["a"]}, batch.has, 0.5), margin({"a": batch.e["a"]}, batch.has)):
        assert loss == 0
        loss.backward()
    one = mcm(batch.joint[:1], {"a": batch.e["a"][:1]}, {"a": batch.has["a"][:1]}, 0.5).mean()
    assert one == 0
    one.backward()


@pytest.mark.parametrize("term", TERMS)
def test_the_meta_device_prices_a_term(term):
    loss = TERMS[term](Batch(device="meta"))
    assert loss.is_meta
    assert loss.shape == ()
    loss.backward()


def test_the_meta_device_prices_what_holds_parameters_near_others():
    own = torch.zeros(2, 3, device="meta", requires_grad=True)
    for anchor in (torch.zeros(2, 3, device="meta"), own):
        loss = squared_distance([(own, anchor)])
        assert loss.is_meta
        loss.backward()


def test_blank_rows_are_zero_and_masked_logits_have_no_share():
    has = torch.tensor([True, False])
    assert blank(torch.tensor([[1.0, 2.0], [torch.nan, 3.0]]), has).tolist() == [[1, 2], [0, 0]]
    assert masked(torch.tensor([[-5.0, torch.inf]]), has).softmax(1).tolist() == [[1, 0]]
    assert masked(torch.tensor([2.0, 3.0]), torch.tensor(False)).softmax(0).tolist() == [0.5, 0.5]
