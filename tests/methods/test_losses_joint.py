"""Terms between the joint representation and the modalities': by hand, and as printed, sum by sum."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses_fixture import EXAMPLES, flags, near, normal, oracle, tensor
from sklearn.metrics.pairwise import cosine_similarity

from edgefl.methods.fedmvp.joint_terms import mcm, ram
from edgefl.methods.gmc import gmc
from edgefl.methods.mmic.reconstruction import reconstruction


def test_mcm_by_hand():
    inputs, expected = oracle("mcm-1")
    e = {"image": inputs["image"], "text": inputs["text"]}
    has = dict.fromkeys(e, torch.ones(2, dtype=torch.bool))
    near(mcm(inputs["joint"], e, has, inputs["temperature"]).values, expected)
    near(mcm(inputs["joint"], e, has, inputs["temperature"]).mean(), -0.1090984382)


def slow_mcm(joint, e, has, temperature, ntxent):
    """As printed, sum by sum; absent modalities left out."""

    def sim(x, y):
        return math.exp(cosine_similarity(x[None], y[None])[0, 0] / temperature)

    rows, values = [i for i in range(len(joint)) if any(has[m][i] for m in e)], []
    for i in rows:
        own, others = [m for m in e if has[m][i]], [j for j in rows if j != i]
        shares = []
        for m in own:
            positive = sim(e[m][i], joint[i])
            omega = sum(sim(e[m][i], e[m][j]) for j in others if has[m][j])
            omega += sum(sim(e[m][i], joint[j]) + sim(joint[i], joint[j]) for j in others)
            shares.append(positive / (omega + (positive if ntxent else 0)) if others else 1.0)
        values.append(-np.mean(np.log(shares)) if ntxent else -math.log(sum(shares)))
    return np.mean(values) if len(rows) > 1 else 0.0


@EXAMPLES
@given(st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=5), st.booleans(), st.integers(0, 99))
def test_mcm_is_the_printed_sum_over_what_is_there(rows, ntxent, seed):
    has = {m: torch.tensor([row[i] for row in rows]) for i, m in enumerate("abc")}
    e, joint = {m: normal(seed + i, len(rows), 3) for i, m in enumerate("abc")}, normal(seed + 9, len(rows), 3)
    terms = mcm(joint, e, has, 0.5, ntxent=ntxent)
    loss = terms.mean()
    near(loss, slow_mcm(joint, e, has, 0.5, ntxent))
    assert not ntxent or loss >= 0
    assert not terms.values[~terms.counts].any()


def test_ram_by_hand():
    inputs, expected = oracle("ram-1")
    e = {"image": inputs["image"], "text": inputs["text"]}
    has = dict.fromkeys(e, torch.ones(2, dtype=torch.bool))
    ce = {"image": inputs["ce_image"], "text": inputs["ce_text"]}
    near(ram(inputs["joint"], e, has, inputs["ce_joint"], ce).mean(), expected)
    partly = has | {"text": torch.tensor([True, False])}
    near(ram(inputs["joint"], e, partly, inputs["ce_joint"], ce).mean(), 0.459505841 / 2)
    worse = ce | {"image": inputs["ce_joint"]}  # an equal cross-entropy is not lower
    near(ram(inputs["joint"], e, has, inputs["ce_joint"], worse).values, [0.0, 1.169420569])


def test_ram_moves_the_joint_only_and_by_finite_steps():
    joint, e, ce = tensor([[1, 0], [3, 4]]).requires_grad_(), tensor([[1, 0], [0, 0]]).requires_grad_(), tensor([1, 1])
    ram(joint, {"a": e}, flags("11"), ce.requires_grad_(), {"a": tensor([0, 0])}).mean().backward()
    near(joint.grad, [[0, 0], [0.3, 0.4]])  # at a distance of 0 the gradient is 0, else of length 1/2
    assert e.grad is None
    assert ce.grad is None


def test_gmc_by_hand():
    """n = 1: the positive is all there is, so 0. n = 2, all four orthogonal but for the pairs: log(1 + 2 e^-2)."""
    e = tensor([[2, 0, 0], [0, 0, 1]])
    near(gmc(e, {"a": e * 3}, flags("10"), 0.5), 0.0)
    near(gmc(e, {"a": e * 3}, flags("11"), 0.5), math.log(1 + 2 * math.exp(-2)))
    near(gmc(e, {"a": e * 3}, flags("11")), math.log(1 + 2 * math.exp(-10)))  # .1 is the default


@EXAMPLES
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5), st.integers(0, 99))
def test_gmc_is_the_sum_over_modalities_of_nt_xent_on_the_rows_that_have_it(rows, seed):
    has = {m: torch.tensor([row[i] for row in rows]) for i, m in enumerate("ab")}
    e, joint = {m: normal(seed + i, len(rows), 3) for i, m in enumerate("ab")}, normal(seed + 9, len(rows), 3)
    expected = 0.0
    for m in "ab":
        n = int(has[m].sum())
        if n == 0:
            continue
        similar = np.exp(cosine_similarity(torch.cat((joint[has[m]], e[m][has[m]]))) / 0.5)
        positive = np.diagonal(similar, n)
        rest = similar.sum(1) - similar.diagonal()
        expected += -np.log(np.tile(positive, 2) / rest).mean()
    near(gmc(joint, e, has, 0.5), expected)


def test_reconstruction_by_hand():
    """a is in rows 0 and 1, b in 1 and 2: row 1 has both. Errors of a (1 + 9)/2, of b 4/2; mean 3.5."""
    real = {"a": tensor([[9, 9], [1, 2], [9, 9]]).requires_grad_(), "b": tensor([[9, 9], [0, 0], [9, 9]])}
    made = {"a": tensor([[0, 0], [2, 5], [0, 0]]).requires_grad_(), "b": tensor([[0, 0], [2, 0], [0, 0]])}
    loss = reconstruction(made, real, flags("110", "011"))
    near(loss.detach(), 3.5)
    loss.backward()
    near(made["a"].grad, [[0, 0], [0.5, 1.5], [0, 0]])
    assert real["a"].grad is None
    near(reconstruction({"b": made["b"]}, real, flags("110", "011")), 2.0)
    near(reconstruction(made, real, flags("110", "001")).detach(), 0.0)
    three = reconstruction(made, real, flags("110", "001", "100"))  # a's row 0 is made from c; b never is
    near(three.detach(), 81.0)
    near(reconstruction({"a": made["a"]}, real, {"a": torch.tensor([True] * 3)}).detach(), 0.0)
