"""What methods and the aggregation refuse: the culprit with its numbers, and the way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_schedule import MODEL

from edgefl.aggregation.history import Memory, coalition_return, note_round
from edgefl.aggregation.mean import MisfitError, WeightedMean
from edgefl.errors import DataError, EdgeFLError, ModelError, RunError
from edgefl.methods import fedopt
from edgefl.methods.fediot import fediot
from edgefl.methods.fedmml.schedule import heads
from edgefl.methods.fedmvp import completion
from edgefl.methods.fedmvp.cka import cka_weights
from edgefl.methods.mmic import poverty_layer
from edgefl.methods.mmic.portfolio import portfolio_momentum
from edgefl.methods.mmic.poverty_substitution import Substitution, substitute
from edgefl.methods.pmcmfl.matcher_networks import MatcherSettings, train_classifier, train_prior
from edgefl.models.spec import EncoderSpec

F32 = np.float32
FIT = "The device and the coordinator must build the same model."
ALIKE = "The devices and the coordinator must build the same model."


class Unreadable:
    @staticmethod
    def from_pretrained(name: str) -> None:
        raise OSError("no such folder\nand much more")


def matcher(rows: float, **settings: float) -> None:
    made = MatcherSettings(**settings)
    train_classifier(torch.nn.Linear(2, 2), torch.full((4, 2), rows), torch.zeros(4, dtype=int), made, gen())


def gen() -> np.random.Generator:
    return np.random.default_rng(0)


def donated(tensors: Mapping[str, Any], weight: float = 1.0) -> None:
    plan = {"a": Substitution("task", "w", ("b",))}
    substitute(lambda device, part: tensors, plan, {"b": weight})


def observed(change: float) -> None:
    observer = poverty_layer.PovertyObserver({})
    observer.batch(True, {})
    observer.batch(False, {"task|w": change})


def changed() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    group = SimpleNamespace(parameters=[weight], lr=0.1, weight_decay=0.0)
    poverty_layer.optimizer_changes(SimpleNamespace(groups=[group]), {weight: "task|w"})  # type: ignore[arg-type]


NO_HEADS = replace(MODEL, classes=0, label_names=(), head=replace(MODEL.head, kind="none"))
ONE = {"w": np.zeros(2, F32)}
WRONG: list[tuple[Callable[[], object], type[EdgeFLError], str, str]] = [
    (
        lambda: heads(NO_HEADS, [1, 2]), ModelError,
        "schedule heads would train nothing: the model has no heads, no reconstruction and no task",
        "Set model.head.kind: mlp, or choose another schedule.",
    ),
    (lambda: fedopt.momentum(None, {}, ONE), ModelError, "tensor 'w' is [2], the server holds nothing", ALIKE),
    (
        lambda: fedopt.momentum(None, {"w": np.zeros(3, F32)}, ONE), ModelError,
        "tensor 'w' is [2], the server holds [3]", ALIKE,
    ),
    (
        lambda: fedopt.momentum({"momentum.w": np.zeros(3, F32)}, ONE, ONE), ModelError,
        "the server's optimiser state 'momentum.w' is [3], the tensor is [2]",
        "Start the run again, or without the saved optimiser state: the model has changed.",
    ),
    (
        lambda: fedopt.fedadam(None, {}, {}, epsilon=0.0), ModelError,
        "the server's step divides by epsilon 0.0 where nothing has changed yet",
        "Set optimise's option epsilon above 0; the paper's is 0.001.",
    ),
    (
        lambda: portfolio_momentum(0.9, 1.0, 5.0), ModelError,
        "momentum 0.9 at temperature 5.0 could grow beyond 1: beta + 1/temperature must be at most 1",
        "Raise optimise.fedadagrad_mpo.temperature or lower its beta.",
    ),
    (
        lambda: fediot({"b": 1, "a": 1, "c": 0}, {"b": 1}), ModelError,
        "how many modalities device 'a' trains is not known",
        "Give the number of modalities of every device with samples, or set weight: samples.",
    ),
    (
        lambda: cka_weights({"b": np.zeros((3, 2)), "a": np.zeros((4, 2))}), ModelError,
        "device 'b' has outputs on 3 probe pairs, 'a' on 4", "Run every device's model on the same probe pairs.",
    ),
    (
        lambda: cka_weights({"a": np.full((3, 2), np.nan)}), ModelError,
        "the outputs of device 'a' on the probe pairs are not finite numbers [pairs, width]: shape [3, 2]",
        "Leave the device out of the round: its model has diverged or is another one.",
    ),
    (
        lambda: matcher(0.0, epochs=0), ModelError, "small models need epochs >= 1 and batches of 2, got 0 and 32",
        "A contrast needs another sample to compare with.",
    ),
    (
        lambda: matcher(0.0, batch_size=1), ModelError,
        "small models need epochs >= 1 and batches of 2, got 100 and 1",
        "A contrast needs another sample to compare with.",
    ),
    (
        lambda: matcher(np.inf, epochs=1), RunError, "a small model's loss became nan",
        "Lower the learning rate of the small models.",
    ),
    (
        lambda: train_prior(torch.nn.Linear(2, 2), torch.zeros(1, 2), torch.zeros(1, 2), MatcherSettings(), gen()),
        DataError, "a prior needs two complete samples or more, got 1 and 1 rows", DataError.remedy,
    ),
    (
        lambda: donated({"w": ONE["w"]}, 0.0), ModelError, "the donors of 'w' in part 'task' have no weight: b",
        "Name as holders only devices that trained the part on samples.",
    ),
    (lambda: donated({}), MisfitError, "donor 'b' lacks tensor 'w' of part 'task'", FIT),
    (
        lambda: donated({"w": np.array([np.nan], F32)}), MisfitError,
        "donor 'b', part 'task': tensor 'w' holds NaN or infinity: nan at [0], and 0 more", FIT,
    ),
    (
        lambda: observed(np.inf), ModelError, "weight 'task|w' changed by inf in one step: training has diverged",
        "Lower the learning rate, or set training.clip_norm.",
    ),
    (
        changed, ModelError, "the change of a step cannot be had from optimiser SimpleNamespace",
        "Train with adamw or sgd, or set repair: {poverty: {form: exact}}.",
    ),
    *(
        (
            lambda own=own: completion._words(EncoderSpec("text", (4,), pretrained=own), np.zeros((1, 4), int)),
            DataError, "text to image needs the texts themselves, and hashed token ids have no way back",
            "Give the text encoder a pretrained checkpoint with a tokenizer, or set generator: nearest.",
        )
        for own in ("", "own.safetensors")
    ),
    (
        lambda: completion._load("somewhere", Unreadable), DataError,
        "the generator 'somewhere' cannot be read: no such folder",
        "Give a folder that holds a checkpoint of this kind, or a name that can be downloaded or is cached.",
    ),
    (
        lambda: WeightedMean().result(), ModelError, "a weighted mean of nothing",
        "Leave a part that nobody trained as it is.",
    ),
    (
        lambda: coalition_return({"a": 0.0, "b": 0.0}, {"b": 1.0, "a": 1.0}), ModelError,
        "the devices a, b weigh nothing together", "Leave devices without samples out of a coalition.",
    ),
    (
        lambda: coalition_return({}, {}), ModelError, "the devices (none) weigh nothing together",
        "Leave devices without samples out of a coalition.",
    ),
    (
        lambda: note_round(Memory(), {"b": 1.0}, {}, {"a": 1.0}), ModelError,
        "device 'b' reports a metric, but took no part in the round", "Give every participant a weight.",
    ),
    (
        lambda: note_round(Memory(), {}, {"b": 1.0}, {"a": 1.0}), ModelError,
        "device 'b' reports a metric of the model it received, but took no part in the round",
        "Give every participant a weight.",
    ),
    (
        lambda: note_round(Memory(), {}, {}, {"a": -1.0}), ModelError, "the weight of device 'a' is -1.0",
        "Leave out a metric that could not be measured; a weight is 0 or more.",
    ),
    (
        lambda: note_round(Memory(), {"a": np.nan}, {}, {"a": 0.0}), ModelError, "the metric of device 'a' is nan",
        "Leave out a metric that could not be measured; a weight is 0 or more.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message", "remedy"), WRONG, ids=[message[:40] for _, _, message, _ in WRONG])
def test_what_is_refused_is_named_with_the_way_out(
    call: Callable[[], object], kind: type[EdgeFLError], message: str, remedy: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert (type(caught.value), caught.value.message, caught.value.remedy) == (kind, message, remedy)
