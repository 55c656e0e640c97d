"""What a user's training function has in hand: a file of declared parts, parts into a model, parts out of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from edgefl.client import Round, TrainedParts, load, save
from edgefl.client.round import sendable
from edgefl.errors import DivergedError, ModelError
from edgefl.models.declared import declared_spec, declared_tensors

PARTS = {"body": ["conv1", "conv2", "norm"], "head": ["fc"]}


class Net(nn.Module):
    """Two layers whose names begin alike, a norm with whole numbers, a head whose weight is tied to a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(3, 4), nn.Linear(4, 4)
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 2)


def a_round(path: Path, *trains: str, **fields: object) -> Round:
    parts = dict(declared_tensors(declared_spec(path)))
    return Round(parts=parts, trains=trains or tuple(parts), **fields)


@pytest.fixture
def initial(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    sizes = save(Net(), PARTS, tmp_path / "initial.safetensors")
    # body: (3 4 + 4) + (4 4 + 4) + four vectors of 4 in 4 bytes, one count in 8; head: 4 2 + 2 numbers of 4 bytes
    assert sizes == {"body": (16 + 20 + 16) * 4 + 8, "head": 40}
    return tmp_path / "initial.safetensors"


def test_parts_are_declared_by_beginnings_of_names_and_the_longest_wins(tmp_path: Path) -> None:
    save(Net(), {"rest": [""], "one": ["conv1", "fc.bias"]}, tmp_path / "a")
    assert declared_spec(tmp_path / "a").parts == ("rest", "one")
    parts = dict(declared_tensors(declared_spec(tmp_path / "a")))
    assert sorted(parts["one"]) == ["conv1.bias", "conv1.weight", "fc.bias"]
    assert "fc.weight" in parts["rest"]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"body": ["conv"], "head": ["fc"]}, "'conv1.weight' is in no declared part"),
        ({"all": [""], "head": ["classifier"]}, "the part 'head' (['classifier']) has no tensor"),
        ({"fusion": [""]}, "'fusion' cannot be a part's name"),
        ({"a/b": [""]}, "'a/b' cannot be a part's name"),
        ({}, "is in no declared part"),
    ],
)
def test_a_declaration_that_is_none_says_why(tmp_path: Path, parts: dict[str, list[str]], text: str) -> None:
    with pytest.raises(ModelError) as error:
        save(Net(), parts, tmp_path / "a")
    assert text in error.value.message
    assert not (tmp_path / "a").exists()


def test_files_of_another_kind_are_no_declarations(tmp_path: Path) -> None:
    save_file({"fc.weight": np.ones(3, np.float32)}, tmp_path / "other")
    (tmp_path / "text").write_text("weights")
    save_file({"x|w": np.ones(1)}, tmp_path / "stray", {"format": "edgefl-declared/1", "parts": '["body"]'})
    save_file({"x|w": np.ones(1)}, tmp_path / "names", {"format": "edgefl-declared/1", "parts": '{"x": 1}'})
    for name in ("other", "text", "stray", "names", "absent"):
        with pytest.raises(ModelError, match=name):
            declared_spec(tmp_path / name)


def test_a_round_goes_into_a_model_and_its_trained_parts_out_again(initial: Path) -> None:
    this, model = a_round(initial, "head"), Net()
    this.load(model)
    assert all(torch.equal(torch.tensor(v), model.state_dict()[n]) for p in this.parts.values() for n, v in p.items())
    assert not model.conv1.weight.requires_grad
    assert model.fc.weight.requires_grad
    with torch.no_grad():
        model.fc.weight += 1
    result, parts = sendable(this, this.trained(model, samples=7, metrics={"accuracy": 0.5}))
    assert result.samples == 7
    assert list(parts) == ["head"]
    np.testing.assert_allclose(parts["head"]["fc.weight"], this.parts["head"]["fc.weight"] + 1)
    with torch.no_grad():
        model.fc.weight += 1
    np.testing.assert_allclose(parts["head"]["fc.weight"], this.parts["head"]["fc.weight"] + 1, err_msg="a copy")


def test_what_a_stage_froze_the_next_sets_free_and_what_its_owner_froze_it_does_not(initial: Path) -> None:
    model = Net()
    model.conv2.weight.requires_grad_(False)
    a_round(initial, "head").load(model)
    assert not model.conv1.weight.requires_grad
    a_round(initial, "body", "head").load(model)
    assert model.conv1.weight.requires_grad
    assert not model.conv2.weight.requires_grad


def test_tied_weights_travel_once_and_stay_tied(tmp_path: Path) -> None:
    model = Net()
    model.again = model.fc
    save(model, {**PARTS, "head": ["fc", "again"]}, tmp_path / "a")
    this = a_round(tmp_path / "a")
    assert sorted(this.parts["head"]) == ["fc.bias", "fc.weight"]
    other = Net()
    other.again = other.fc
    this.load(other)
    assert torch.equal(other.again.weight, torch.tensor(this.parts["head"]["fc.weight"]))


def test_half_precision_travels_as_f32_and_comes_back(tmp_path: Path) -> None:
    model = Net().to(torch.bfloat16)
    save(model, PARTS, tmp_path / "a")
    this, again = a_round(tmp_path / "a"), Net().to(torch.bfloat16)
    assert this.parts["head"]["fc.weight"].dtype == np.float32
    this.load(again)
    assert torch.equal(again.fc.weight, model.fc.weight)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.__delattr__("fc"), "part head: the model has no 'fc.bias'"),
        (lambda m: setattr(m, "fc", nn.Linear(4, 3)), "the model's 'fc.bias' is [3], the run's [2]"),
        (lambda m: setattr(m, "more", nn.Linear(1, 1)), "'more.weight' is in no part of the run"),
    ],
)
def test_another_model_is_refused_and_nothing_changes(initial: Path, change: object, text: str) -> None:
    model = Net()
    change(model)
    before = model.conv1.weight.clone()
    with pytest.raises(ModelError) as error:
        a_round(initial).load(model)
    assert text in error.value.message
    assert "edgefl.client.save" in error.value.remedy
    assert torch.equal(model.conv1.weight, before)


def test_weights_come_back_from_a_file(initial: Path) -> None:
    model = Net()
    load(model, initial)
    assert torch.equal(model.fc.weight, torch.tensor(a_round(initial).parts["head"]["fc.weight"]))


def test_steps_are_reported_and_a_loss_that_is_none_ends_the_round(initial: Path) -> None:
    told: list[tuple[object, ...]] = []
    this = a_round(initial, on_step=lambda *step: told.append(step))
    this.step(torch.tensor(2.0), epoch=1)
    this.step(1.0, epoch=1, steps=9)
    this.step(0.5, epoch=2, step=7, steps=9)
    assert told == [(1, 1, 0, 2.0), (1, 2, 9, 1.0), (2, 7, 9, 0.5)]
    with pytest.raises(DivergedError, match="nan at step 4"):
        this.step(float("nan"))


def nan_of(parts: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    return {part: {name: value * np.nan for name, value in each.items()} for part, each in parts.items()}


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (lambda parts: None, ModelError, "train returned NoneType"),
        (lambda parts: TrainedParts({}, 3), ModelError, "train returned no part 'head'"),
        (lambda parts: TrainedParts({**parts, "body": {}}, 3), ModelError, "a part it was not asked for 'body'"),
        (lambda parts: TrainedParts(parts, 0), ModelError, "samples is 0"),
        (lambda parts: TrainedParts(parts, 2.5), ModelError, "samples is 2.5"),
        (lambda parts: TrainedParts(parts, True), ModelError, "samples is True"),
        (lambda parts: TrainedParts(parts, 3, {"f1": "0.5"}), ModelError, "the metric f1 is str"),
        (lambda parts: TrainedParts({"head": {"fc.weight": [1.0]}}, 3), ModelError, "'fc.weight' is list"),
        (lambda parts: TrainedParts({"head": {}}, 3), ModelError, "part head: the model has no 'fc.bias'"),
        (
            lambda parts: TrainedParts({"head": {n: v[:1] for n, v in parts["head"].items()}}, 3),
            ModelError,
            "'fc.bias' is [1], the run's [2]",
        ),
        (lambda parts: TrainedParts(nan_of(parts), 3), DivergedError, "'fc.bias' has values that are not finite"),
    ],
)
def test_what_cannot_be_sent_says_why(initial: Path, result: object, kind: type[Exception], text: str) -> None:
    this = a_round(initial, "head")
    with pytest.raises(kind) as error:
        sendable(this, result({"head": dict(this.parts["head"])}))
    assert text in error.value.message


def test_extra_state_and_quantised_tensors_cannot_be_declared(tmp_path: Path) -> None:
    model = Net()
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"'phase' is torch\.complex64"):
        save(model, {"all": [""]}, tmp_path / "a")


class Normed(nn.Module):
    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        if copies:
            self.register_state_dict_post_hook(
                lambda _, state, *__: state.update({name: value.clone() for name, value in state.items()})
            )


def test_a_frozen_batch_norm_that_moves_is_no_part_of_what_is_sent(tmp_path: Path) -> None:
    save(Normed(), {"body": ["body"], "head": ["head"]}, tmp_path / "normed.safetensors")
    for frozen_in_eval in (True, False):
        this, model = a_round(tmp_path / "normed.safetensors", "head"), Normed()
        this.load(model)
        model.train()
        if frozen_in_eval:
            model.body.eval()
        model.head(model.body(torch.randn(8, 3) + 5)).sum().backward()
        if frozen_in_eval:
            assert set(this.trained(model, samples=np.int64(8)).parts) == {"head"}
            continue
        with pytest.raises(ModelError, match=r"'body\.1\.\w+' of part body, which this stage does not train"):
            this.trained(model, samples=8)


def test_a_state_dict_of_copies_is_refused(tmp_path: Path) -> None:
    save(Normed(), {"body": ["body"], "head": ["head"]}, tmp_path / "normed.safetensors")
    with pytest.raises(ModelError, match=r"has a copy of 'body\.0\.weight'"):
        a_round(tmp_path / "normed.safetensors", "head").load(Normed(copies=True))
