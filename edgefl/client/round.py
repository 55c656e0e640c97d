"""One round of training as a device's own code sees it: parts into its model, progress, trained parts out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.client.tensors import as_array, named_tensors
from edgefl.errors import DivergedError, ModelError

if TYPE_CHECKING:
    from transformers import TrainerCallback

Arrays = Mapping[str, np.ndarray]
_SAME = "Build the model as it was when edgefl.client.save wrote the run's file (model.own)."


@dataclass(frozen=True)
class Trained:
    """What a round's training sends: part -> tensors, how many samples it learned from, and its metrics."""

    parts: Mapping[str, Arrays]
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
        """Copy every part into ``model`` and freeze what this stage does not train; ``device`` is left to you.

        Only parameters that an earlier ``load`` froze are set free again. Raises ModelError for a model of other
        tensors, and changes nothing then.
        """
        targets = named_tensors(model)
        owner = {name: part for part, tensors in self.parts.items() for name in tensors}
        check_shapes(owner, self.parts, {name: tuple(tensor.shape) for name, tensor in targets.items()})
        with torch.no_grad():
            for part in self.parts:
                for name, value in self.parts[part].items():
                    targets[name].copy_(torch.from_numpy(np.array(value)))
        for name, tensor in targets.items():
            if not isinstance(tensor, nn.Parameter):
                continue
            if owner[name] in self.trains:
                if getattr(tensor, "edgefl_frozen", False):
                    tensor.requires_grad_(True)
            elif tensor.requires_grad:
                tensor.requires_grad_(False)
                tensor.edgefl_frozen = True  # type: ignore[attr-defined]

    def step(self, loss: float | Tensor, *, epoch: int = 0, step: int = 0, steps: int = 0) -> None:
        """Report one step; ``step``: its number, 0: counted here; ``steps``: of the whole round, 0: not known.

        Optional: without it nobody sees progress, and a round that is not wanted any more goes on to its end. Raises
        DivergedError for a loss that is not finite; let what it raises pass.
        """
        value = float(loss)
        if not math.isfinite(value):
            remedy = "Lower training.lr.head, or clip gradients in your code."
            raise DivergedError(f"the loss became {value} at step {len(self.losses) + 1}", remedy=remedy)
        self.losses.append(value)
        self.on_step(epoch, step or len(self.losses), steps, value)

    def trained(self, model: nn.Module, samples: int, metrics: Mapping[str, float] | None = None) -> Trained:
        """The trained parts out of ``model``, for ``train`` to return. ``samples``: how many it learned from."""
        targets = named_tensors(model)
        parts = {
            part: {name: as_array(targets[name]) for name in self.parts[part] if name in targets} for part in self.trains
        }
        return Trained(parts, samples, metrics or {})

    def callback(self) -> TrainerCallback:
        """A callback for `transformers.Trainer` that reports each step."""
        from edgefl.client.hugging_face import StepCallback

        return StepCallback(self)


def check_shapes(owner: Mapping[str, str], parts: Mapping[str, Arrays], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError that names the first missing, surplus or misshapen tensor of a model, and its part."""
    for part, tensors in parts.items():
        for name, value in tensors.items():
            if name not in shapes:
                raise ModelError(f"part {part}: the model has no {name!r}", remedy=_SAME)
            if shapes[name] != value.shape:
                text = f"part {part}: the model's {name!r} is {list(shapes[name])}, the run's {list(value.shape)}"
                raise ModelError(text, remedy=_SAME)
    if surplus := [name for name in shapes if name not in owner]:
        raise ModelError(f"the model's {surplus[0]!r} is in no part of the run", remedy=_SAME)


def check_trained(this: Round, result: object) -> Trained:
    """What a training function returned, if it can be sent. Raises ModelError, DivergedError."""
    way_out = "End train with `return round.trained(model, samples=...)`."
    if not isinstance(result, Trained):
        raise ModelError(f"train returned {type(result).__name__}, not what is trained", remedy=way_out)
    if not isinstance(result.samples, int) or isinstance(result.samples, bool) or result.samples < 1:
        raise ModelError(f"samples is {result.samples!r}: give the number of samples learned from", remedy=way_out)
    for name, value in result.metrics.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise ModelError(f"the metric {str(name)[:80]!r} is {type(value).__name__}, not a number", remedy=way_out)
    if wrong := sorted({*this.trains} ^ {*result.parts}):
        text = f"train returned {'other parts than asked for' if wrong[0] in result.parts else 'no'} {wrong[0]!r}"
        raise ModelError(f"{text}; this stage trains {', '.join(this.trains)}", remedy=way_out)
    for part in this.trains:
        for name, value in result.parts[part].items():
            if not isinstance(value, np.ndarray):
                raise ModelError(f"part {part}: {str(name)[:80]!r} is {type(value).__name__}, no array", remedy=way_out)
        owner = dict.fromkeys(this.parts[part], part)
        check_shapes(owner, {part: this.parts[part]}, {name: value.shape for name, value in result.parts[part].items()})
        for name, value in result.parts[part].items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                text = f"part {part}: {name!r} has values that are not finite after training"
                raise DivergedError(text, remedy="Lower training.lr.head, or clip gradients in your code.")
    return result
