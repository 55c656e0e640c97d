"""The retrieval task inside other terms (AproMFL) has the margins of the recipe."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from losses_fixture import term
from training_fixture import job, model_spec, random_batch

from edgefl.methods.apromfl.margin import task_loss
from edgefl.models.staged import build
from edgefl.training.batches import Batch
from edgefl.training.forward import Auxiliary, Forward, copied
from edgefl.training.step import run_forward

OPTIONS = {"weight": 1.0, "temperature": 1.0}
SPEC = model_spec(stages=1, classes=0, modalities="ab")


def forward(margins: dict[str, float] | None) -> Forward:
    """Two samples with a = b = the two axes: s_ii = 1, s_12 = 0. The received heads: both samples the same."""
    axes, same = torch.eye(2, 6), torch.ones(2, 6)
    private_heads = {m: torch.nn.Identity() for m in "ab"}
    teachers = {"a": _always(same), "b": _always(same)}
    terms = {} if margins is None else {"margin": {"weight": 3.0, **margins}}
    values = {"a": axes, "b": axes}
    auxiliary = Auxiliary(private_heads=private_heads, teachers=teachers)
    return Forward(
        build(SPEC, device="meta"),
        2,
        values,
        values,
        dict.fromkeys("ab"),
        None,
        ("zero", {}),
        auxiliary,
        objective=terms,
    )


class _always(torch.nn.Module):  # noqa: N801 - reads as a value
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value


@pytest.mark.parametrize(
    ("margins", "expected"),
    [
        ({"positive": 1.5, "negative": 0.2}, 0.5),  # relu(1.5 - 1) + relu(0 - 0.2)
        ({"positive": 0.8, "negative": -0.5}, 0.5),  # relu(0.8 - 1) + relu(0 + 0.5)
        ({"positive": 1.5, "negative": -0.5}, 1.0),
        ({"positive": 0.8, "negative": 0.2}, 0.0),
        (None, 0.0),  # the paper's, 0.8 and 0.2
    ],
)
def test_the_private_copies_learn_their_task_with_the_recipes_margins(margins, expected):
    # Without pseudo-labels the term is the task alone; its weight is another term's.
    assert term("cluster_contrast", forward(margins), OPTIONS).item() == pytest.approx(expected)


def test_the_teachers_worth_is_by_the_recipes_margins():
    # local 0.5; the teacher's s_ii = s_12 = 1: relu(1.5 - 1) + relu(1 - 0.2) = 1.3; nu = 0.5 / 1.3, by default 0 / 0.8.
    by_recipe = term("model_transfer", forward({"positive": 1.5, "negative": 0.2}), OPTIONS)
    # The teacher's rows are all alike in every coordinate, of length 1 or not: softmax makes them flat.
    local, flat = torch.eye(2, 6).softmax(1), torch.full((2, 6), 1 / 6)
    divergence = (local * (local / flat).log()).sum(1).mean()
    assert by_recipe.item() == pytest.approx(0.5 / 1.3 * divergence.item(), rel=1e-5)
    assert term("model_transfer", forward(None), OPTIONS).item() == 0


def test_a_step_hands_the_recipes_terms_on():
    margin = {"weight": 1.0, "positive": 1.5, "negative": -0.5}
    made = job(SPEC, objective={"margin": margin, "cluster_contrast": OPTIONS}, missing={"ignore": {}})
    model = build(made.model, made.stage.present)
    batch = random_batch()
    unlabelled = Batch(batch.size, batch.inputs, batch.rows, None)
    private_heads = {m: copied(model.part(f"head/{m}"), trained=True) for m in "ab"}
    done = run_forward(model, made, unlabelled, Auxiliary(private_heads=private_heads))
    task = term("margin", done.forward, margin)
    # The copies are the heads themselves so far, so that both terms have one value.
    assert done.loss.item() == pytest.approx(2 * task.item(), rel=1e-5)
    assert task.item() > 0.5


def test_the_task_of_a_device_with_labels_is_of_the_modalities_that_a_sample_has():
    """Mean fusion: sample 0 by a alone, sample 1 by both, and where b is not here at all everyone by a."""
    model = build(msgspec.structs.replace(model_spec(stages=1, modalities="ab"), fusion="mean"))
    given = dataclasses.replace(forward(None), model=model, labels=torch.tensor([0, 2]))
    values = {"a": torch.eye(2, 6), "b": torch.ones(2, 6)}
    every, second = torch.tensor([True, True]), torch.tensor([False, True])
    for has, fused in (
        ({"a": every, "b": second}, [values["a"][0], (values["a"][1] + values["b"][1]) / 2]),
        ({"a": every}, list(values["a"])),
    ):
        expected = torch.nn.functional.cross_entropy(model.classify(torch.stack(fused)), given.labels)
        own = {m: values[m] for m in has}
        torch.testing.assert_close(task_loss(given, own, has), expected)
