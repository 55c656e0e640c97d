"""Tensors of a user's module by the names of its ``state_dict``, tied ones once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.errors import ModelError

Arrays = dict[str, np.ndarray]
_SAME = "Build the model as it was when edgefl.client.save wrote the run's file (model.own)."


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor, as they are in the module; of names that share one tensor (tied weights) the first alone.

    Raises ModelError for what no part can hold: quantised, complex or sparse tensors, and extra state.
    """
    found: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (
            not isinstance(tensor, Tensor)
            or tensor.is_quantized
            or tensor.is_complex()
            or tensor.layout != torch.strided
        ):
            what = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            remedy = "Keep it out of the state_dict (register_buffer(..., persistent=False)), or as plain numbers."
            raise ModelError(f"the model's {name!r} is {what}, which cannot be sent", remedy=remedy)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and not tensor.is_meta and place in seen:
            continue
        seen.add(place)
        found[name] = tensor
    return found


def as_array(tensor: Tensor) -> np.ndarray:
    """A copy of a tensor as it travels: floats as float32, whole numbers as they are."""
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    array: np.ndarray = tensor.detach().to("cpu", kind, copy=True).contiguous().numpy()
    return array


def fill(model: nn.Module, parts: Mapping[str, Arrays]) -> dict[str, str]:
    """Copy the parts into ``model``; name of each of its tensors -> part.

    Raises ModelError for a model of other tensors, and changes nothing then.
    """
    targets = named_tensors(model)
    check_shapes(parts, {name: tuple(tensor.shape) for name, tensor in targets.items()})
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    if copied := [name for name, tensor in targets.items() if id(tensor) not in held]:
        remedy = "Have state_dict() give the module's own tensors, without hooks that copy them."
        raise ModelError(
            f"the model's state_dict has a copy of {copied[0]!r}, which cannot be loaded into", remedy=remedy
        )
    with torch.no_grad():
        for tensors in parts.values():
            for name, value in tensors.items():
                targets[name].copy_(torch.from_numpy(np.array(value)))
    return {name: part for part, tensors in parts.items() for name in tensors}


def check_buffers(part: str, received: Arrays, targets: Mapping[str, Tensor]) -> None:
    """Raise ModelError for a buffer (batch norm's statistics) that training has changed."""
    for name, value in received.items():
        tensor = targets.get(name)
        if tensor is None or isinstance(tensor, nn.Parameter):
            continue
        before = torch.from_numpy(np.array(value)).to(tensor.dtype)
        if not torch.equal(tensor.detach().cpu(), before):
            text = f"{name!r} of part {part}, which this stage does not train, has changed in training"
            raise ModelError(text, remedy="Put its module into eval() after model.train(): its statistics stay behind.")


def check_shapes(parts: Mapping[str, Arrays], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError that names the first missing, misshapen or surplus tensor of a model with these ``shapes``."""
    known = set()
    for part, tensors in parts.items():
        for name, value in tensors.items():
            known.add(name)
            if name not in shapes:
                raise ModelError(f"part {part}: the model has no {name!r}", remedy=_SAME)
            if shapes[name] != value.shape:
                text = f"part {part}: the model's {name!r} is {list(shapes[name])}, the run's {list(value.shape)}"
                raise ModelError(text, remedy=_SAME)
    if surplus := [name for name in shapes if name not in known]:
        raise ModelError(f"the model's {surplus[0]!r} is in no part of the run", remedy=_SAME)
