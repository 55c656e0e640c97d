"""The example package's learned token: its gradient by hand, and what a fleet makes of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from extra_fixture import extra
from memory_fleet import check_trained, plan_of, run_fleet, share, state_of
from training_fixture import model_spec

from edgefl import registry
from edgefl.models.staged import build
from edgefl.protocol.tensors import decode_part
from edgefl.training.forward import Forward

module = extra("learned_token")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._methods, "missing", dict(registry.methods("missing")))
    registry.register(module.LEARNED_TOKEN)


def test_a_token_learns_from_the_rows_that_lack_its_modality_alone() -> None:
    """Of a mean fusion f = (r_a + t_b) / 2 in those rows: dL/dt_b = 1/B sum over them of (p - y) W / 2."""
    spec = msgspec.structs.replace(model_spec(), fusion="mean", stand_in={"learned_token": {"spread": 0.5}})
    model, draw = build(spec, ["missing", "task"]), np.random.default_rng(0)
    r_a, r_b = draw.normal(size=(4, 6)).astype(np.float32), draw.normal(size=(2, 6)).astype(np.float32)
    labels = np.array([0, 1, 2, 1])
    projected = {"a": torch.from_numpy(r_a), "b": torch.from_numpy(r_b)}
    rows = {"a": None, "b": torch.tensor([0, 2])}  # rows 1 and 3 lack b
    slot = ("learned_token", {"spread": 0.5, "drop": 0.0})
    forward = Forward(model, 4, {}, projected, rows, torch.from_numpy(labels), slot)
    F.cross_entropy(forward.logits, forward.labels).backward()
    part, task = model.part("missing"), model.part("task")
    tokens, weight, bias = (t.detach().numpy() for t in (part.tokens, task.weight, task.bias))
    f = (r_a + np.stack([r_b[0], tokens[1], r_b[1], tokens[1]])) / 2
    scores = np.exp(f @ weight.T + bias)
    error = (scores / scores.sum(1, keepdims=True) - np.eye(3)[labels]) / 4
    expected = (error @ weight / 2)[[1, 3]].sum(0)
    np.testing.assert_allclose(part.tokens.grad[1], expected, atol=1e-6)
    assert np.abs(tokens[1]).min() > 0
    assert (part.tokens.grad[0] == 0).all()  # no row lacks a


def test_a_fleet_learns_tokens_that_answer_otherwise_than_zeros(tmp_path: Path) -> None:
    settings = ["training.rounds=[0,3]", "slots.missing={learned_token: {drop: 0.3}}", "slots.prototypes=none"]
    plan = plan_of(tmp_path, "end_to_end", "ab", 2, settings)
    report = run_fleet(tmp_path, plan, {"x": share(24, {"a": 1.0, "b": 0.5}, 1), "y": share(24, {"a": 1.0}, 2)})
    check_trained(tmp_path, plan)
    store, state = state_of(tmp_path)
    (tokens,) = decode_part(store.read(state["missing"].id)).values()
    first = build(plan.model, ["missing"], seed=plan.seed).part("missing").tokens.detach().numpy()
    assert tokens.shape == (2, 8)
    assert np.abs(tokens - first).max(axis=1).min() > 1e-4  # both have moved
    areas = {
        row.missing: row.value
        for row in report.evaluations
        if (row.round, row.available, row.metric) == (3, ("a",), "macro_auroc")
    }
    assert areas["learned_token"] != areas["zero"]
