"""One round of training as a device's own code sees it: parts into its model, progress, trained parts out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from edgefl.client.tensors import Arrays, as_array, check_buffers, check_shapes, fill, named_tensors
from edgefl.errors import DivergedError, ModelError

if TYPE_CHECKING:
    from transformers import TrainerCallback

#: Mark of a parameter that ``load`` has frozen; one that its owner froze has none, and stays frozen.
_FROZEN = "edgefl_frozen"
_METRICS = "Give them by name as numbers, such as {'accuracy': 0.9}."


@dataclass(frozen=True)
class TrainedParts:
    """Outcome of a round's training: part -> tensors, number of samples learned from, metrics."""

    parts: Mapping[str, Mapping[str, object]]
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Round:
    """A round of one stage. ``data``: the device's --data as it was given; ``device``: torch's name of where to train.

    ``parts``: tensors of every part, as received; ``trains``: the parts to train and send back. ``epochs``,
    ``batch_size`` and ``lr`` are the run file's (training.lr.head); ``seed`` differs between devices and rounds,
    reproducibly. ``on_step(epoch, step, steps, loss)`` may raise to end the round.
    """

    parts: Mapping[str, Arrays]
    trains: tuple[str, ...]
    stage: int = 1
    number: int = 1
    epochs: int = 1
    batch_size: int = 16
    lr: float = 1e-3
    seed: int = 0
    device: str = "cpu"
    data: str = ""
    on_step: Callable[[int, int, int, float], None] = lambda *_: None
    losses: list[float] = field(default_factory=list)

    def load(self, model: nn.Module) -> None:
        """Copy every part into ``model`` and freeze those that this stage does not train; ``device`` is left to you.

        Only parameters that an earlier ``load`` froze are set free again. Raises ModelError for a model of other
        tensors, and changes nothing then.
        """
        owner = fill(model, self.parts)
        for name, tensor in named_tensors(model).items():
            if not isinstance(tensor, nn.Parameter):
                continue
            if owner[name] in self.trains:
                if getattr(tensor, _FROZEN, False):
                    tensor.requires_grad_(True)
                    delattr(tensor, _FROZEN)
            elif tensor.requires_grad:
                tensor.requires_grad_(False)
                setattr(tensor, _FROZEN, True)

    def step(self, loss: float | Tensor, *, epoch: int = 0, step: int = 0, steps: int = 0) -> None:
        """Report one step; ``step``: its number, 0: counted here; ``steps``: of the whole round, 0: not known.

        Optional: without it there is no progress to see, and a round that is left off goes on to its end. Raises
        DivergedError for a loss that is not finite; let what it raises pass.
        """
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if not math.isfinite(value):
            remedy = "Lower training.lr.head, or clip gradients in your code."
            raise DivergedError(f"the loss became {value} at step {len(self.losses) + 1}", remedy=remedy)
        self.losses.append(value)
        self.on_step(epoch, step or len(self.losses), steps, value)

    def trained(self, model: nn.Module, samples: int, metrics: Mapping[str, float] | None = None) -> TrainedParts:
        """The trained parts out of ``model``, for ``train`` to return. ``samples``: how many it learned from.

        Raises ModelError where a buffer of a part that this stage does not train has changed: it stays behind, and the
        model sent would be another than the one trained.
        """
        targets = named_tensors(model)
        for part in self.parts.keys() - {*self.trains}:
            check_buffers(part, self.parts[part], targets)
        parts = {
            part: {name: as_array(targets[name]) for name in self.parts[part] if name in targets}
            for part in self.trains
        }
        return TrainedParts(parts, samples, metrics or {})

    def callback(self) -> TrainerCallback:
        """A callback for `transformers.Trainer` that reports each step."""
        from edgefl.client.hugging_face import StepCallback

        return StepCallback(self)


def sendable(this: Round, result: object) -> tuple[TrainedParts, dict[str, Arrays]]:
    """A training function's result, and its parts if they can be sent. Raises ModelError, DivergedError."""
    if not isinstance(result, TrainedParts):
        raise _unfit(f"train returned {type(result).__name__}, not what is trained")
    given: object = result.samples
    samples = int(given) if isinstance(given, np.integer) else given
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise _unfit(f"samples is {samples!r:.80}: give the number of samples learned from")
    if wrong := sorted({*this.trains} ^ {*result.parts}):
        text = "a part it was not asked for" if wrong[0] in result.parts else "no part"
        raise _unfit(f"train returned {text} {wrong[0]!r:.80}; this stage trains {', '.join(this.trains)}")
    parts = {part: _arrays(this, part, result.parts[part]) for part in this.trains}
    return replace(result, samples=samples, metrics=numbers(result.metrics)), parts


def numbers(metrics: object) -> dict[str, float]:
    """The metrics that a function returned, tensors of one value among them. Raises ModelError for anything else."""
    if not isinstance(metrics, Mapping):
        raise ModelError(f"{type(metrics).__name__} is no mapping of metrics", remedy=_METRICS)
    found: dict[str, float] = {}
    for name, value in metrics.items():
        single = value.detach().item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(name, str) or isinstance(single, bool) or not isinstance(single, int | float | np.number):
            raise ModelError(f"the metric {name!s:.80} is {type(value).__name__}, not a number", remedy=_METRICS)
        found[name] = float(single)
    return found


def _arrays(this: Round, part: str, tensors: Mapping[str, object]) -> Arrays:
    """The tensors of one part, of the shapes received and finite."""
    found: Arrays = {}
    for name, value in tensors.items():
        if not isinstance(value, np.ndarray):
            raise _unfit(f"part {part}: {name!r:.80} is {type(value).__name__}, not an array")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            text = f"part {part}: {name!r} has values that are not finite after training"
            raise DivergedError(text, remedy="Lower training.lr.head, or clip gradients in your code.")
        found[name] = value
    check_shapes({part: this.parts[part]}, {name: value.shape for name, value in found.items()})
    return found


def _unfit(text: str) -> ModelError:
    return ModelError(text, remedy="End train with `return round.trained(model, samples=...)`.")
