"""Terms that pull towards something given, by hand and against SciPy: prototypes, a teacher, earlier parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses_fixture import EXAMPLES, flags, near, normal, oracle, table, tensor
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from edgefl.errors import ModelError
from edgefl.training.losses.model_transfer import kl_divergence, model_transfer, ratio
from edgefl.training.losses.prototype_transfer import js_divergence, prototype_transfer
from edgefl.training.losses.proximal import proximal, regulariser, squared_distance


def test_js_divergence_by_hand():
    inputs, expected = oracle("transfer-1")
    near(js_divergence(inputs["p"].log(), inputs["q"].log()), expected)


@EXAMPLES
@given(st.integers(1, 6), st.integers(0, 1000))
def test_js_divergence_is_scipys_squared_distance(size, seed):
    p, q = normal(seed, size).softmax(0), normal(seed + 1, size).softmax(0)
    assert js_divergence(p.log(), q.log()).item() == pytest.approx(jensenshannon(p, q) ** 2, abs=1e-12)
    assert abs(js_divergence(p.log(), p.log()).item()) < 1e-15


def test_prototype_transfer_by_hand():
    """Row 0 sees [1, 0] and [0, 1]: softmax(1, 0) and softmax(0, 1); row 1 sees the same twice; row 2 lacks b."""
    e = {"a": tensor([[2, 0], [0, 1], [1, 1]]), "b": tensor([[0, 1], [0, 3], [5, 5]])}
    tables = {m: table(tensor([[4, 0], [0, 1]])) for m in "ab"}
    p = np.exp([1, 0]) / np.exp([1, 0]).sum()
    near(prototype_transfer(e, flags("111", "110"), tables, 1.0), jensenshannon(p, p[::-1]) ** 2 / 2)
    sharp = np.exp(np.array([1, 0]) / 0.07) / np.exp(np.array([1, 0]) / 0.07).sum()
    near(prototype_transfer(e, flags("111", "110"), tables), jensenshannon(sharp, sharp[::-1]) ** 2 / 2)


def test_prototype_transfer_is_over_prototypes_that_both_have_and_pairs_that_count():
    e = {m: normal(i, 3, 4) for i, m in enumerate("abc")}
    rows = {m: normal(7 + i, 3, 4) for i, m in enumerate("abc")}
    every = flags("111", "111", "111")
    partly = {"a": table(rows["a"], [True, True, False]), "b": table(rows["b"], [True, True, True])}
    pairs = {m: table(rows[m][:2]) for m in "ab"}
    alone = prototype_transfer({m: e[m] for m in "ab"}, every, pairs, 0.5)
    torch.testing.assert_close(prototype_transfer(e, every, partly, 0.5), alone)  # c has no prototypes
    nobody = partly | {"c": table(rows["c"], [False] * 3)}
    torch.testing.assert_close(prototype_transfer(e, every, nobody, 0.5), alone)
    both = prototype_transfer(e, every, {m: table(rows[m]) for m in "abc"}, 0.5)
    each = [prototype_transfer(e, every, {m: table(rows[m]) for m in pair}, 0.5) for pair in ("ab", "ac", "bc")]
    torch.testing.assert_close(both, torch.stack(each).mean())
    assert prototype_transfer(e, every, {}, 0.5) == 0


def test_model_transfer_by_hand():
    inputs, expected = oracle("transfer-2")
    local, glob = {"a": inputs["local"].unsqueeze(0)}, {"a": inputs["glob"].unsqueeze(0)}
    near(inputs["nu"] * kl_divergence(inputs["local"], inputs["glob"], 1.0), expected)
    near(model_transfer(local, glob, flags("1"), inputs["nu"]), expected)
    near(model_transfer(local, glob, flags("1"), ratio(tensor(0.3), tensor(0.6))), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_model_transfer_agrees_with_scipy_and_has_no_gradient_for_the_teacher(temperature):
    local, glob = normal(1, 3, 5).requires_grad_(), normal(2, 3, 5).requires_grad_()
    p, q = ((x.detach() / temperature).softmax(1).numpy() for x in (local, glob))
    near(kl_divergence(local, glob, temperature).detach(), entropy(p, q, axis=1))
    near(kl_divergence(local, glob, temperature, reverse=True).detach(), entropy(q, p, axis=1))
    e, teacher, has = {"a": local, "b": local * 2, "c": local}, dict.fromkeys("abc", glob), flags("110", "011", "000")
    loss = model_transfer(e, teacher, has, 2.0, temperature, reverse=True)
    doubled = (local.detach() * 2 / temperature).softmax(1).numpy()
    expected = entropy(q, p, axis=1)[:2].mean() + entropy(q, doubled, axis=1)[1:].mean()
    near(loss.detach(), expected)  # times two, over the two modalities at hand
    loss.backward()
    assert glob.grad is None
    assert local.grad.abs().sum() > 0


def test_nu_is_a_constant_and_zero_when_the_teacher_has_no_loss():
    a, b = tensor(0.5).requires_grad_(), tensor(0.25).requires_grad_()
    nu = ratio(a, b)
    assert nu == 2
    assert not nu.requires_grad
    assert ratio(a, b * 0) == 0


# ---- proximal


def test_regulariser_by_hand():
    inputs, expected = oracle("regulariser-1")
    own, private = {"theta": inputs["theta"]}, {"theta": inputs["theta_private"]}
    near(regulariser(own, private, inputs["weight"]), expected)
    near(regulariser(own, private), expected)
    near(proximal(own, private, 0.1), 0.1 / 2 * 5)


def test_the_gradient_of_proximal_is_mu_times_the_distance():
    own = {"w": normal(1, 2, 3).requires_grad_(), "b": normal(2, 3).requires_grad_()}
    received = {"w": normal(3, 2, 3).requires_grad_(), "b": normal(4, 3), "not trained": normal(5, 1)}
    proximal(own, received, 0.3).backward()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, 0.3 * (parameter - received[name]).detach())
    assert received["w"].grad is None


def test_what_has_no_anchor_is_named():
    assert squared_distance({}, {}) == 0
    with pytest.raises(ModelError, match=r"'w' is \[2\], what it should stay near is not there"):
        squared_distance({"w": torch.zeros(2)}, {})
    with pytest.raises(ModelError, match=r"'w' is \[2\], what it should stay near is \[1\]"):
        squared_distance({"w": torch.zeros(2)}, {"w": torch.zeros(1)})
