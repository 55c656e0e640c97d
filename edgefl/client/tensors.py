"""Tensors of a user's module by the names of its ``state_dict``, tied ones once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.errors import ModelError


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor, as they are in the module; of names that share one tensor (tied weights) the first alone.

    Raises ModelError for what no part can hold: quantised, complex or sparse tensors, and extra state.
    """
    found: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or tensor.is_quantized or tensor.is_complex() or tensor.layout != torch.strided:
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
    """A tensor as it travels: floats as float32, whole numbers as they are."""
    wide = tensor.detach().to(torch.float32) if tensor.is_floating_point() else tensor.detach()
    array: np.ndarray = wide.to("cpu").contiguous().numpy()
    return array
