"""Parts as named numpy tensors, out of a model and back into it.

Tensor names are part-relative and the same for every version of `transformers`, so that machines with different
versions understand each other; dense layers of BERT travel under ViT's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.models.tensor_names import stable_name
from edgefl.storage.file_pages import copied

Tensors = dict[str, np.ndarray]


def part_tensors(model: StagedModel, part: str, *, copy: bool = True) -> Tensors:
    """The part's parameters and buffers by name; floats as float32. Not for models on "meta".

    ``copy`` False: what lies in the CPU's memory as float32 is shown where it is, and changes when the model does.
    """
    return module_tensors(model.part(part), copy=copy)


def module_tensors(module: nn.Module, *, copy: bool = True) -> Tensors:
    """A module's parameters and persistent buffers under their stable names, as ``part_tensors``."""
    return {name: _to_numpy(tensor, copy=copy) for name, tensor in named_tensors(module).items()}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers (not copied) under their stable names."""
    return {stable_name(name): tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters under their stable names."""
    return {stable_name(name): parameter for name, parameter in module.named_parameters()}


def load_part(model: StagedModel, part: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Copy tensors into the part. A missing, surplus or misshapen one: ModelError, and nothing is changed."""
    load_module(part, model.part(part), tensors)


def loaded(spec: ModelSpec, present: Sequence[str], parts: Mapping[str, Mapping[str, np.ndarray]]) -> StagedModel:
    """The parts ``present`` of a model with their tensors, in evaluation mode. Raises ModelError as ``load_part``."""
    model = build(spec, present)
    for part in present:
        load_part(model, part, parts[part])
    return model.eval()


def load_module(part: str, module: nn.Module, tensors: Mapping[str, np.ndarray]) -> None:
    """As :func:`load_part`, into a module that is, or is like, the part."""
    targets = named_tensors(module)
    check_tensors(part, {name: tuple(t.shape) for name, t in targets.items()}, tensors)
    for name, target in targets.items():
        value = np.asarray(tensors[name])
        if target.is_floating_point() != (value.dtype.kind == "f"):
            raise ModelError(f"{part}: the tensor '{name}' is {value.dtype}, but the model has {target.dtype}")
    with torch.no_grad():
        for name, target in targets.items():
            # Arrays decoded from received bytes are read-only, and torch wants to own what it wraps: on a CPU numpy
            # copies them to where they belong, on a GPU a copy of one at a time is made.
            if target.device.type == "cpu":
                copied(np.asarray(tensors[name]), target.numpy())
            else:
                target.copy_(torch.from_numpy(np.array(tensors[name])))


def check_tensors(part: str, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, np.ndarray]) -> None:
    """Raise ModelError that names the first missing, unexpected or misshapen tensor of a part."""
    check_shapes(part, expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def check_shapes(part: str, expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """As :func:`check_tensors`, where the tensors themselves are not read."""
    for name, shape in expected.items():
        if name not in shapes:
            raise ModelError(f"{part}: the tensor '{name}' {list(shape)} is missing")
        if shapes[name] != shape:
            raise ModelError(
                f"{part}: the tensor '{name}' has shape {list(shapes[name])}, but the model needs {list(shape)}"
            )
    surplus = sorted(set(shapes) - set(expected))
    if surplus:
        raise ModelError(f"{part}: the tensor '{surplus[0]}' {list(shapes[surplus[0]])} is not in the model")


def part_size_bytes(model: StagedModel, part: str) -> int:
    """Bytes of a part's parameters and persistent buffers, as exchanged.

    Works on the meta device.
    """
    return sum(t.numel() * t.element_size() for t in named_tensors(model.part(part)).values())


def part_layout(model: StagedModel, part: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (safetensors' type as it travels in f32, shape). Works on the meta device."""
    whole = {torch.int64: "I64"}
    return {n: (whole.get(t.dtype, "F32"), tuple(t.shape)) for n, t in named_tensors(model.part(part)).items()}


def _to_numpy(tensor: Tensor, *, copy: bool) -> np.ndarray:
    wide = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    array: np.ndarray = wide.to("cpu", copy=copy).contiguous().numpy()
    return array
