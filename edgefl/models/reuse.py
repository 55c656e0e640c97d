"""Models kept from one device's round for the next one's, whose weights are copied into the same modules.

Building a small model takes a quarter of the time of its round: modules are made, and first weights drawn that the
received ones replace. What else a round leaves behind (gradients, modes, flags, buffers that do not travel) is put
back as it was built; a model that was changed otherwise, such as by hooks, is not used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from edgefl.models.spec import ModelSpec
from edgefl.models.staged import StagedModel, build

#: Models kept at a time: devices of a few kinds (modalities, ranks) take turns.
MOST_MODELS = 4
#: Weights of the models kept, together; what is larger is built for each round. Two of 16 million parameters: they lie
#: in memory while the coordinator evaluates, and while another stage's model is trained.
MOST_BYTES = 128 * 2**20
#: Whose modules are known to hold no state but weights, buffers and plain attributes; others are looked at.
_KNOWN = ("torch.", "edgefl.")
#: Attributes that cannot change in place.
_VALUES = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))
#: Attributes that torch gives every module.
_TORCHS = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


class _Built(NamedTuple):
    """A model and its state when it was built, apart from the weights."""

    key: tuple[object, ...]
    model: StagedModel
    modules: list[nn.Module]
    kinds: list[type[nn.Module]]
    names: list[set[str]]  # of all of a module's attributes
    attributes: list[dict[str, Any]]  # of each module
    hooks: list[dict[int, Any]]
    parameters: list[tuple[nn.Parameter, bool]]  # and whether it takes a gradient
    buffers: list[tuple[Tensor, Tensor]]  # that do not travel, and their values

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.nbytes for parameter, _ in self.parameters)


class Models:
    """Models of rounds, one round at a time."""

    def __init__(self) -> None:
        self._kept: list[_Built] = []

    def take(self, spec: ModelSpec, parts: Sequence[str], device: str, seed: int) -> StagedModel:
        """The model as ``build`` makes it, but for its weights, every one of which the caller sets.

        Ends the use of what it gave for the same arguments before.
        """
        key = (spec, tuple(parts), device, seed)
        found = next((one for one in self._kept if one.key == key), None)
        if found is not None:
            self._kept.remove(found)
            if not _restored(found):
                found = None
        if found is None:
            model = build(spec, parts, device, seed)
            if not all(map(_is_plain, model.modules())):
                return model
            found = _noted(key, model)
        self._kept = [found, *self._kept[: MOST_MODELS - 1]]
        while sum(one.nbytes for one in self._kept) > MOST_BYTES:
            self._kept.pop()
        return found.model


def _noted(key: tuple[object, ...], model: StagedModel) -> _Built:
    modules = list(model.modules())
    travelling = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return _Built(
        key,
        model,
        modules,
        list(map(type, modules)),
        [set(vars(module)) for module in modules],
        [_plain(module) for module in modules],
        [vars(module)[name] for module in modules for name in _HOOKS],
        [(parameter, parameter.requires_grad) for parameter in model.parameters()],
        [(buffer, buffer.clone()) for buffer in model.buffers() if id(buffer) not in travelling],
    )


def _is_known(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_KNOWN)


def _is_plain(module: nn.Module) -> bool:
    """True if weights, buffers and what ``_plain`` gives are all of a module's state.

    A class that a function has made may share state with it.
    """
    if _is_known(module):
        return True
    return "<locals>" not in type(module).__qualname__ and all(
        _is_value(value) for name, value in vars(module).items() if name not in _TORCHS
    )


def _is_value(value: object) -> bool:
    return all(map(_is_value, value)) if isinstance(value, tuple) else isinstance(value, _VALUES)


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, such as ``training``."""
    hides = frozenset(vars(module)) if _is_known(module) else _TORCHS
    return {name: value for name, value in vars(module).items() if not (name in hides and name.startswith("_"))}


def _restored(built: _Built) -> bool:
    """Put a model back to how it was built; False where that cannot be done."""
    modules, parameters = list(built.model.modules()), list(built.model.parameters())
    if list(map(id, modules)) != list(map(id, built.modules)) or list(map(type, modules)) != built.kinds:
        return False
    if list(map(id, parameters)) != [id(parameter) for parameter, _ in built.parameters]:
        return False
    if any(built.hooks):
        return False
    for module, names, attributes in zip(modules, built.names, built.attributes, strict=True):
        if vars(module).keys() != names:
            return False
        vars(module).update(attributes)
    for parameter, takes_gradient in built.parameters:
        parameter.grad = None
        if parameter.requires_grad != takes_gradient:
            parameter.requires_grad_(takes_gradient)
    with torch.no_grad():
        for buffer, value in built.buffers:
            buffer.copy_(value)
    return True
