"""Every term that couples the samples of a batch: its gradient in micro-batches is that of the whole batch."""

from __future__ import annotations

import msgspec
import pytest
import torch
from training_fixture import CROSS_ENTROPY, job, model_spec, random_batch, stages_of, with_hyper

from edgefl.models.spec import ModelSpec
from edgefl.models.staged import build
from edgefl.plan.job import Job
from edgefl.prototypes.mask import Table
from edgefl.prototypes.table import FUSED
from edgefl.training.batches import Batch
from edgefl.training.forward import Auxiliary, copied
from edgefl.training.step import prepare, run_backward, run_forward

BOTH_MISS_SOME = {"a": [1, 2, 4, 5], "b": [0, 2, 3, 5]}
TERMS = {
    "clip": {"temperature": 0.05},
    "margin": {"positive": 0.9, "negative": 0.3},
    "modality_contrast": {"temperature": 0.1},
    "prototype_contrast": {"temperature": 0.1, "negatives": "batch"},
    "prototype_alignment": {},
    "cluster_contrast": {"temperature": 0.1},
    "prototype_transfer": {"temperature": 0.1},
    "model_transfer": {"temperature": 0.1},
    "mcm": {"temperature": 0.1, "form": "literal"},
    "gmc": {"temperature": 0.1},
}
ALONE = ("clip", "margin")


def doubled(batch: Batch, pseudo_labels: torch.Tensor | None) -> Batch:
    inputs = {m: x.double() for m, x in batch.inputs.items()}
    return Batch(batch.size, inputs, batch.rows, batch.labels, pseudo_labels=pseudo_labels)


def gradients(made: Job, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in double precision, the private copies' among them."""
    model = build(made.model, made.stage.present, seed=1).double()
    prepare(model, made.stage.trained)
    draw = torch.Generator().manual_seed(2)
    wide = {"a": 6, "b": 6, FUSED: made.model.fusion_width}
    valid = torch.tensor([True, True, True])
    tables = {m: Table(torch.randn(3, width, generator=draw).double(), valid) for m, width in wide.items()}
    heads = {m: model.part(f"head/{m}") for m in "ab"}
    torch.manual_seed(5)
    private_heads, teachers = (
        {m: copied(head, trained=trained).double() for m, head in heads.items()} for trained in (True, False)
    )
    with torch.no_grad():
        for head in (*private_heads.values(), *teachers.values()):
            for parameter in head.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    pseudo_labels = torch.tensor([0, 1, 1, 0, 2, 2][: batch.size])
    auxiliary = Auxiliary(tables, private_heads, teachers)
    done = run_forward(model, made, doubled(batch, pseudo_labels), auxiliary)
    run_backward(model, made, doubled(batch, pseudo_labels), done)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {
        f"{m} private_heads {name}": p.grad
        for m in private_heads
        for name, p in private_heads[m].named_parameters()
        if p.grad is not None
    }
    return float(done.loss.detach()), found


def made_for(term: str, schedule: str) -> Job:
    plain = model_spec(classes=0 if term in ALONE else 3)
    spec = ModelSpec(plain.encoders, 3, plain.head, 6, plain.classes, plain.label_names)  # fused as wide as projected
    objective = {} if term in ALONE else dict(CROSS_ENTROPY)
    objective[term] = {"weight": 1.0, **TERMS[term]}
    return job(spec, stages_of(spec, schedule)[-1], objective=objective)


@pytest.mark.parametrize("rows", [{}, {"b": [0, 2, 3]}, BOTH_MISS_SOME], ids=["complete", "one", "both"])
@pytest.mark.parametrize("schedule", ["end_to_end", "layerwise"])
@pytest.mark.parametrize("term", TERMS)
def test_the_gradient_in_pieces_is_that_of_the_whole_batch(term, schedule, rows):
    made, batch = made_for(term, schedule), random_batch(rows)
    loss, expected = gradients(made, batch)
    without = {name: options for name, options in made.slots.objective.items() if name != term}
    if without:  # the term is there, and not nothing
        fewer = msgspec.structs.replace(made, slots=msgspec.structs.replace(made.slots, objective=without))
        assert gradients(fewer, batch)[0] != pytest.approx(loss, abs=1e-6)
    for micro in (1, 2, 4):
        pieces, found = gradients(with_hyper(made, micro_batch=micro), batch)
        assert pieces == pytest.approx(loss, abs=1e-9)
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=1e-6, msg=name)
