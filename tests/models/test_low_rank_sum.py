"""The sum of a weight and its low-rank term for many rows: values, gradients, FLOPs, and when it is made."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from edgefl.models.low_rank import LowRank, LowRankPart, some_rows
from edgefl.models.spec import LoraSpec, rank_slices
from edgefl.resources.tensor_counters import FlopCounter
from edgefl.training.step import computing_in


def linear_with_terms(slices: int = 1, inputs: int = 12, outputs: int = 8) -> tuple[nn.Linear, list[LowRank]]:
    spec = LoraSpec(4, 8.0, ("x",)) if slices == 1 else LoraSpec(4, 8.0, ("x",), fallback_ranks=(2,))
    holder = nn.Module()
    holder.add_module("map", nn.Linear(inputs, outputs).double().requires_grad_(False))
    terms = []
    for start in rank_slices(spec):
        part = LowRankPart({"map": holder.map}, spec, start).double()
        part.attach(holder)
        terms.append(part.map)
        nn.init.normal_(part.map.B)
    return holder.map, terms


def beside(layer: nn.Linear, terms: list[LowRank], x: torch.Tensor) -> torch.Tensor:
    """By the paper's equation (3)."""
    return F.linear(x, layer.weight, layer.bias) + sum(one.scale * x @ one.A.T @ one.B.T for one in terms)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("rows", [2, 50])
def test_many_rows_go_through_the_sum_and_few_through_the_term(slices: int, rows: int) -> None:
    torch.manual_seed(1)
    layer, terms = linear_with_terms(slices)
    x = torch.randn(rows // 2, 2, 12, dtype=torch.float64, requires_grad=True)
    learned = [x, *(p for one in terms for p in one.parameters())]
    found = layer(x)
    assert (type(found.grad_fn).__name__ == "_MergedBackward") == (rows == 50)
    torch.testing.assert_close(found, beside(layer, terms, x))
    after = torch.randn_like(found)
    expected = torch.autograd.grad(beside(layer, terms, x), learned, after)
    for one, other in zip(torch.autograd.grad(found, learned, after), expected, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(some_rows(layer, x, slice(2, 5)), beside(layer, terms, x)[..., 2:5])


def test_a_model_with_terms_goes_with_its_last_reference() -> None:
    """Not at some later collection of garbage: the parts that a trainer loads in turn would be in memory together."""
    layer, _ = linear_with_terms()
    other, known = copy.deepcopy(layer), weakref.ref(layer.weight)
    x = torch.randn(50, 12, dtype=torch.float64)
    torch.testing.assert_close(other(x), layer(x))
    gc.disable()
    try:
        del layer, _
        assert known() is None
        assert other(x).shape == (50, 8)
    finally:
        gc.enable()


def test_the_sum_takes_fewer_flops_than_a_term_of_every_row() -> None:
    layer, terms = linear_with_terms(inputs=64, outputs=64)
    x = torch.randn(500, 64, dtype=torch.float64, requires_grad=True)
    spent = []
    for run in (lambda: layer(x), lambda: beside(layer, terms, x)):
        with FlopCounter() as counter:
            run().sum().backward()
        spent.append(counter.flops)
    of_the_map, term = 2 * 500 * 64 * 64, 2 * 500 * 64 * 4
    assert spent[1] - spent[0] == pytest.approx(2 * term - 2 * 2 * 64 * 64 * 4, abs=2 * term)
    assert spent[0] < spent[1] < 2 * of_the_map + 7 * term


@pytest.mark.parametrize("rows", [40, 60, 70])
def test_a_step_never_takes_more_flops_than_with_terms_of_every_row(rows: int) -> None:
    # Forward and backward make the sum once each, 2 * 2 * 64 * 64 * 4, and save one term, 2 * rows * (64 + 64) * 4.
    layer, terms = linear_with_terms(inputs=64, outputs=64)
    x = torch.randn(rows, 64, dtype=torch.float64, requires_grad=True)
    spent = []
    for run in (lambda: layer(x), lambda: F.linear(x, layer.weight) + F.linear(F.linear(x, terms[0].A), terms[0].B)):
        with FlopCounter() as counter:
            run().sum().backward()
        spent.append(counter.flops)
    assert spent[1] - spent[0] == max(0, 2 * rows * (64 + 64) * 4 - 2 * 2 * 64 * 64 * 4)


def test_a_bias_that_is_trained_beside_a_frozen_weight_has_its_gradient() -> None:
    layer, _ = linear_with_terms()
    layer.bias.requires_grad_(True)
    layer(torch.randn(50, 12, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((8,), 50.0, dtype=torch.float64))


def test_the_sum_is_not_made_in_mixed_precision_nor_of_a_weight_that_is_trained() -> None:
    layer, _ = linear_with_terms()
    x = torch.randn(50, 12, dtype=torch.float64, requires_grad=True)
    assert type(layer(x).grad_fn).__name__ == "_MergedBackward"
    layer.weight.requires_grad_(True)
    assert type(layer(x).grad_fn).__name__ == "AddBackward0"
    layer.weight.requires_grad_(False)
    for device in map(torch.device, ("cpu", "meta")):
        here, terms = linear_with_terms()
        for module in (here, *terms):
            module.float().to(device)
        x = torch.empty(50, 12, device=device, requires_grad=True)
        assert type(here(x).grad_fn).__name__ == "_MergedBackward"
        with computing_in("bf16", device):
            assert type(here(x).grad_fn).__name__ == "AddBackward0"


def test_a_deep_copy_computes_with_its_own_terms() -> None:
    layer, (term,) = linear_with_terms()
    holder = nn.ModuleList([layer, term])
    other, own = copy.deepcopy(holder)
    nn.init.zeros_(own.B)
    x = torch.randn(50, 12, dtype=torch.float64)
    torch.testing.assert_close(other(x), F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer(x), beside(layer, [term], x))
