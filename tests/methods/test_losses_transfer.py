"""Terms that pull towards something given, by hand and against SciPy: prototypes, a teacher, earlier parameters."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses_fixture import EXAMPLES, flags, near, normal, oracle, table, tensor
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from edgefl.methods.apromfl.regulariser import regulariser
from edgefl.methods.apromfl.transfer import js_divergence, kl_divergence, model_transfer, prototype_transfer, ratio
from edgefl.methods.fedprox import proximal
from edgefl.registry import methods


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
    """Row 0 sees [1, 0] and [0, 1]: softmax(1, 0) and softmax(0, 1); row 1 sees the same twice; row 2 has nothing."""
    e = {"a": tensor([[2, 0], [0, 1], [1, 1]]), "b": tensor([[0, 1], [0, 3], [5, 5]])}
    tables = {m: table(tensor([[4, 0], [0, 1]])) for m in "ab"}
    p = np.exp([1, 0]) / np.exp([1, 0]).sum()
    near(prototype_transfer(e, flags("110", "110"), tables, 1.0), jensenshannon(p, p[::-1]) ** 2 / 2)
    sharp = np.exp(np.array([1, 0]) / 0.07) / np.exp(np.array([1, 0]) / 0.07).sum()
    near(prototype_transfer(e, flags("110", "110"), tables), jensenshannon(sharp, sharp[::-1]) ** 2 / 2)


def test_the_one_embedding_of_a_unimodal_device_is_compared_with_both_halves_by_hand():
    """e = [2, 0]; halves p^a = [1, 0], [0, 1] and p^b = [0, 1], [1, 0]; τ = 1.

    Q^a = softmax(1, 0) = (p, 1 - p) with p = 0.731059, Q^b = (1 - p, p), M = (½, ½):
    JS = p ln 2p + (1 - p) ln 2(1 - p) = 0.731059 · 0.379885 - 0.268941 · 0.620115 = 0.110944.
    By the angle φ of e: p = σ(cos φ - sin φ), dJS/dp = ln p/(1 - p) = 1 at φ = 0, dp/dφ = -p (1 - p) = -0.196612, and
    dφ = de_2 / |e| = de_2 / 2: the gradient is (0, -0.098306).
    """
    e = {"a": tensor([[2, 0]]).requires_grad_()}
    tables = {"a": table(tensor([[1, 0], [0, 1]])), "b": table(tensor([[0, 1], [1, 0]]))}
    loss = prototype_transfer(e, flags("1"), tables, 1.0)
    near(loss.detach(), 0.110944)
    loss.backward()
    near(e["a"].grad, [[0, -0.098306]])


def test_a_row_of_one_modality_counts_like_one_of_both_by_hand():
    """Row 0 has both: Q^a = softmax(1, 0), Q^b = softmax(1, 0), 0. Row 1 has only a, row 2 only b: 0.110944 each."""
    e = {"a": tensor([[2, 0], [2, 0], [7, 7]]), "b": tensor([[0, 3], [7, 7], [1, 0]])}
    tables = {"a": table(tensor([[1, 0], [0, 1]])), "b": table(tensor([[0, 1], [1, 0]]))}
    near(prototype_transfer(e, flags("110", "101"), tables, 1.0), 2 * 0.110944 / 3)
    alone = prototype_transfer({"a": e["a"][1:2]}, flags("1"), tables, 1.0)
    near(prototype_transfer({m: rows[1:2] for m, rows in e.items()}, flags("1", "0"), tables, 1.0), alone)


def test_of_three_modalities_a_row_of_two_compares_these_and_a_row_of_one_every_pair_it_is_in():
    e = {m: normal(i, 1, 4) for i, m in enumerate("abc")}
    tables = {m: table(normal(7 + i, 3, 4)) for i, m in enumerate("abc")}
    two = prototype_transfer(e, flags("1", "1", "0"), tables, 0.5)
    torch.testing.assert_close(two, prototype_transfer(e, flags("1", "1"), {m: tables[m] for m in "ab"}, 0.5))
    one = prototype_transfer(e, flags("0", "1", "0"), tables, 0.5)
    each = [prototype_transfer(e, flags("0", "1", "0"), {m: tables[m] for m in pair}, 0.5) for pair in ("ab", "bc")]
    torch.testing.assert_close(one, torch.stack(each).mean())


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
    scaled = {m: torch.nn.functional.normalize(rows) for m, rows in (local | {"b": glob["a"]}).items()}
    by_units = inputs["nu"] * kl_divergence(scaled["a"], scaled["b"], 1.0)
    near(model_transfer(local, glob, flags("1"), inputs["nu"]), by_units[0])
    near(model_transfer(local, glob, flags("1"), ratio(tensor(0.3), tensor(0.6))), by_units[0])


def test_model_transfer_compares_unit_vectors_by_hand():
    """ê_local = [3, 4]/5, ê_global = [1, 0]; T = 1, ν = 2.

    P = softmax(0.6, 0.8) = (0.450166, 0.549834), Q = softmax(1, 0) = (0.731059, 0.268941):
    KL = 0.450166 ln(0.450166/0.731059) + 0.549834 ln(0.549834/0.268941) = -0.218275 + 0.393199 = 0.174924.
    """
    has = flags("1")
    near(model_transfer({"a": tensor([[3, 4]])}, {"a": tensor([[9, 0]])}, has, 2.0), 2 * 0.174924)
    near(model_transfer({"a": tensor([[30, 40]])}, {"a": tensor([[1, 0]])}, has, 2.0), 2 * 0.174924)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_model_transfer_agrees_with_scipy_and_has_no_gradient_for_the_teacher(temperature):
    local, glob = normal(1, 3, 5).requires_grad_(), normal(2, 3, 5).requires_grad_()
    p, q = ((x.detach() / temperature).softmax(1).numpy() for x in (local, glob))
    near(kl_divergence(local, glob, temperature).detach(), entropy(p, q, axis=1))
    near(kl_divergence(glob, local, temperature).detach(), entropy(q, p, axis=1))
    p, q = ((x / x.norm(dim=1, keepdim=True) / temperature).softmax(1).numpy() for x in (local.detach(), glob.detach()))
    e, teachers, has = {"a": local, "b": local * 2, "c": local}, dict.fromkeys("abc", glob), flags("110", "011", "000")
    loss = model_transfer(e, teachers, has, 2.0, temperature)
    expected = entropy(p, q, axis=1)[:2].mean() + entropy(p, q, axis=1)[1:].mean()  # twice as long: as far away
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
    own, private = torch.nn.Parameter(inputs["theta"]), torch.nn.Parameter(inputs["theta_private"])
    copies = {"a": torch.nn.ParameterDict({"theta": private})}
    model = SimpleNamespace(part={"head/a": torch.nn.ParameterDict({"theta": own})}.__getitem__)
    forward = SimpleNamespace(
        model=model, auxiliary=SimpleNamespace(private_heads=copies, received={"theta": (own, private)})
    )
    assert methods("objective")["regulariser"].options["weight"].default == inputs["weight"]
    near(inputs["weight"] * regulariser(forward).detach(), expected)
    near(0.1 * proximal(forward).detach(), 0.1 / 2 * 5)


def test_the_gradient_of_proximal_is_mu_times_the_distance():
    own = {"w": normal(1, 2, 3).requires_grad_(), "b": normal(2, 3).requires_grad_()}
    received = {"w": normal(3, 2, 3).requires_grad_(), "b": normal(4, 3)}
    pairs = {name: (parameter, received[name]) for name, parameter in own.items()}
    (0.3 * proximal(SimpleNamespace(auxiliary=SimpleNamespace(received=pairs)))).backward()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, 0.3 * (parameter - received[name]).detach())
    assert received["w"].grad is None


def test_a_head_that_is_not_its_copy_s_shape_is_refused():
    model = SimpleNamespace(part=lambda name: torch.nn.Linear(2, 3))
    for other, error in ((torch.nn.Linear(4, 3), RuntimeError), (torch.nn.Linear(2, 3, bias=False), ValueError)):
        forward = SimpleNamespace(model=model, auxiliary=SimpleNamespace(private_heads={"a": other}))
        with pytest.raises(error):
            regulariser(forward)
