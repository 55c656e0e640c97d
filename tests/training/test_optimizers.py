"""The local optimisers against torch's own, and what they leave alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from edgefl.training import optimizers
from edgefl.training.optimizers import SGD, Adafactor, AdamW, Group, parameters_of


def pair() -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Two equal sets of parameters."""
    first = [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (3,), (2, 2, 2))]
    return first, [torch.nn.Parameter(p.detach().clone()) for p in first]


def made(name: str, groups: tuple[Group, ...], momentum: float) -> AdamW | SGD | Adafactor:
    return {"adamw": AdamW(groups), "adafactor": Adafactor(groups)}.get(name) or SGD(groups, momentum)


def reference_of(name: str, groups: list[dict], momentum: float) -> torch.optim.Optimizer:
    if name == "adafactor":
        return torch.optim.Adafactor(groups, eps=(1e-30, 1e-3))
    return torch.optim.AdamW(groups) if name == "adamw" else torch.optim.SGD(groups, momentum=momentum)


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-6])
@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd with momentum", "adafactor"])
def test_the_same_steps_as_torch(name, size):
    """``size``: of the gradients; those of a wide map's mean loss are about 1e-5."""
    torch.manual_seed(0)
    ours, theirs = pair()
    groups = (Group(tuple(ours[:2]), 0.1, 0.01), Group(tuple(ours[2:]), 0.02, 0.0))
    other = [
        {"params": theirs[:2], "lr": 0.1, "weight_decay": 0.01},
        {"params": theirs[2:], "lr": 0.02, "weight_decay": 0},
    ]
    momentum = 0.9 if "momentum" in name else 0.0
    mine, reference = made(name, groups, momentum), reference_of(name, other, momentum)
    for step in range(7):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = size * torch.randn_like(a)
            b.grad = a.grad.clone()
        if step == 3:  # a parameter that took no part keeps its value and its state
            ours[1].grad = theirs[1].grad = None
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_adafactor_leaves_what_has_no_gradient_yet():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 2.0]])
    Adafactor((Group((weight,), 0.1, 0.0),)).step()
    assert (weight[:, 0] == 1).all()
    assert weight[1, 1] == 1
    assert (weight[[0, 2], 1] < 1).all()


def test_adafactors_rate_falls_below_the_one_it_is_given_as_torchs_does():
    """At 0.8 the relative step size min(lr, 1/sqrt(step)) is the second from the second step on."""
    torch.manual_seed(0)
    ours, theirs = pair()
    mine = Adafactor((Group(tuple(ours), 0.8, 0.0),))
    reference = torch.optim.Adafactor([{"params": theirs, "lr": 0.8, "weight_decay": 0}], eps=(1e-30, 1e-3))
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("together", [30, 2**18])
def test_how_many_are_updated_together_changes_nothing(together, monkeypatch):
    torch.manual_seed(0)
    alone, mine = pair()
    optimizers = [AdamW((Group(tuple(parameters), 0.1, 0.01),)) for parameters in (alone, mine)]
    for step in range(4):
        for a, b in zip(alone, mine, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        if step == 1:  # from now on one of them is an update behind
            alone[1].grad = mine[1].grad = None
        for optimizer, size in zip(optimizers, (0, together), strict=True):
            monkeypatch.setattr("edgefl.training.optimizers.TOGETHER_BYTES", size)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(alone, mine, strict=True))


def test_one_step_by_hand():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    weight.grad = torch.tensor([0.5, -3.0])
    AdamW((Group((weight,), 0.1, 0.5),)).step()  # m/(1-b1) = g, v/(1-b2) = g^2: a step of lr against the sign of g
    torch.testing.assert_close(weight.detach(), torch.tensor([1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1]))


def test_without_gradients_nothing_changes():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD((Group((weight,), 0.1, 0.5),), 0.9)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    assert parameters_of(optimizer) == [weight]


def test_neither_a_step_nor_its_count_loads_torch_s_compiler():
    code = """
import sys, torch
from edgefl.resources.tensor_counters import FlopCounter
from edgefl.training.optimizers import AdamW, Group
p = torch.nn.Parameter(torch.ones(3, 3))
with FlopCounter() as counter:
    (p @ p).sum().backward()
AdamW((Group((p,), 0.1),)).step()
assert counter.flops == 3 * 2 * 27, counter.flops
sys.exit(int("torch._dynamo" in sys.modules or "sympy" in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_parameters_are_updated_together_up_to_a_size(monkeypatch):
    """Of parameters of 8 bytes three fit into 24; one that is larger alone goes alone."""
    monkeypatch.setattr(optimizers, "TOGETHER_BYTES", 24)
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (2, 2, 2, 2, 2, 2, 2, 9, 2)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    together = AdamW((Group(tuple(parameters), 0.1),))._together(Group(tuple(parameters), 0.1))
    assert [[len(p) for p in some] for _, some in together] == [[2, 2, 2], [2, 2, 2], [2], [9], [2]]
