"""A model that is kept for the next device gives what one built for it gives, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from training_fixture import dataset, job, model_spec, parts_of, stages_of

from edgefl.models import reuse
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.reuse import MOST_MODELS, Models
from edgefl.plan.job import Job
from edgefl.training import local_round
from edgefl.training.local_round import LocalState, RoundResult, train_round


def rounds(made: Job, models: Models | None) -> list[RoundResult]:
    """Rounds of three devices, the second without one sensor, each as it is before the next one begins."""
    found = []
    for number, absent in enumerate(({}, {"b": list(range(12))}, {"a": [0, 1]})):
        state = LocalState(dataset(6, seed=9), models=models)
        done = train_round(made, dataset(absent=absent, seed=number), parts_of(made, number), state, salt=str(number))
        copied = {part: {name: t.copy() for name, t in tensors.items()} for part, tensors in done.parts.items()}
        found.append(replace(done, parts=copied, kept={}, compute_s=0.0))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_rounds_over_one_model_give_what_rounds_over_their_own_give(stage: int, dropout: float) -> None:
    spec = model_spec(dropout=dropout)
    made = job(spec, stages_of(spec)[stage])
    for own, kept in zip(rounds(made, None), rounds(made, Models()), strict=True):
        assert own.metrics == kept.metrics
        assert own.parts.keys() == kept.parts.keys()
        for part, tensors in own.parts.items():
            assert all(np.array_equal(value, kept.parts[part][name]) for name, value in tensors.items()), part


def test_one_model_is_built_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = reuse.build
    monkeypatch.setattr(reuse, "build", lambda *given: built.append(given) or build(*given))
    monkeypatch.setattr(local_round, "build", lambda *given, **named: pytest.fail("a round built its own"))
    rounds(job(), Models())
    assert len(built) == 1


def test_what_a_round_changes_beside_the_weights_is_as_it_was_built() -> None:
    spec, models = model_spec(), Models()
    taken = models.take(spec, ["a/embed", "head/a"], "cpu", 0)
    built = {name: value.copy() for name, value in part_tensors(taken, "head/a").items()}
    hidden = torch.ones(2)
    taken.register_buffer("hidden", hidden, persistent=False)  # seen only by a model that is noted with it
    noted = reuse._noted(("key",), taken)
    taken.eval().requires_grad_(False)
    hidden.zero_()
    parameter = next(taken.parameters())
    parameter.grad = torch.zeros_like(parameter)
    assert reuse._restored(noted)
    assert all(module.training for module in taken.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in taken.parameters())
    assert hidden.tolist() == [1.0, 1.0]
    load_part(taken, "head/a", built)


def test_a_model_with_hooks_or_other_modules_is_not_used_again() -> None:
    spec, models = model_spec(), Models()
    parts = ["a/embed", "head/a"]
    first = models.take(spec, parts, "cpu", 0)
    assert models.take(spec, parts, "cpu", 0) is first
    handle = first.part("head/a").register_forward_hook(lambda *_: None)
    second = models.take(spec, parts, "cpu", 0)
    assert second is not first
    handle.remove()
    second.part("head/a").add_module("more", nn.Linear(1, 1))
    assert models.take(spec, parts, "cpu", 0) is not second


class Plain(nn.Module):
    """A module of a user's own; its attributes are values."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self._seen, self.sizes = 2, 0, (1, (2.0, "a"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._seen += 1
        return x**self.power


class Remembering(Plain):
    """One with a state that no copy of its attributes puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[torch.Tensor] = []


def with_own(monkeypatch: pytest.MonkeyPatch, own: type[nn.Module]) -> Models:
    """Models whose head has a module of this class."""
    build = reuse.build

    def built(*given: object) -> object:
        model = build(*given)  # type: ignore[arg-type]
        model.part("head/a").add_module("own", own())
        return model

    monkeypatch.setattr(reuse, "build", built)
    return Models()


def test_a_users_module_is_used_again_with_the_values_it_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    models, spec = with_own(monkeypatch, Plain), model_spec()
    first = models.take(spec, ["head/a"], "cpu", 0)
    own = first.part("head/a").get_submodule("own")
    assert isinstance(own, Plain)
    own(torch.ones(1))
    own.power, own.training = 3, False
    assert models.take(spec, ["head/a"], "cpu", 0) is first
    assert (own.power, own._seen, own.training) == (2, 0, True)


def test_a_users_module_with_other_state_is_built_for_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Plain):  # which may share state with the function that makes it
        pass

    spec = model_spec()
    for own in (Remembering, Local):
        with monkeypatch.context() as patch:
            models = with_own(patch, own)
            assert models.take(spec, ["head/a"], "cpu", 0) is not models.take(spec, ["head/a"], "cpu", 0)


def test_other_parts_or_another_seed_are_another_model() -> None:
    spec, models = model_spec(), Models()
    first = models.take(spec, ["head/a"], "cpu", 0)
    assert models.take(spec, ["head/a", "head/b"], "cpu", 0).parts_present == ("head/a", "head/b")
    assert models.take(spec, ["head/a"], "cpu", 1) is not first
    assert models.take(model_spec(dropout=0.5), ["head/a"], "cpu", 0) is not first
    assert models.take(spec, ["head/a"], "cpu", 0) is first


def test_a_few_models_are_kept() -> None:
    spec, models = model_spec(), Models()
    first = models.take(spec, ["head/a"], "cpu", 0)
    others = [models.take(spec, ["head/a"], "cpu", seed) for seed in range(1, MOST_MODELS + 1)]
    assert models.take(spec, ["head/a"], "cpu", MOST_MODELS) is others[-1]
    assert models.take(spec, ["head/a"], "cpu", 0) is not first


def test_large_models_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the coordinator, and the model of the next stage, each would stay in memory."""
    spec, models = model_spec(), Models()
    head = models.take(spec, ["head/a"], "cpu", 0)
    own = sum(parameter.nbytes for parameter in head.parameters())
    monkeypatch.setattr(reuse, "MOST_BYTES", 2 * own)
    second = models.take(spec, ["head/a"], "cpu", 1)
    assert models.take(spec, ["head/a"], "cpu", 0) is head
    third = models.take(spec, ["head/a"], "cpu", 2)
    assert models.take(spec, ["head/a"], "cpu", 1) is not second, "the one used longest ago is parted from"
    assert models.take(spec, ["head/a"], "cpu", 2) is third
    monkeypatch.setattr(reuse, "MOST_BYTES", own - 1)
    assert models.take(spec, ["head/a"], "cpu", 3) is not models.take(spec, ["head/a"], "cpu", 3)
    assert not models._kept
