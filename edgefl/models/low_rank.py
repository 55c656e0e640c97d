"""Low-rank terms of linear maps (LoRA, Hu et al., arXiv 2106.09685): y = W x + b + (alpha / rank) B A x, W frozen.

The terms are a part of their own, and the part they adapt keeps its tensors and their names: a hook on each linear map
adds its term. A begins as the paper's code has it (Kaiming uniform), B at zero, so that the first output is the base's.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.spec import LoraSpec, lora_part
from edgefl.models.tensor_names import stable_name

_WEIGHT = ".weight"


class LowRank(nn.Module):
    """(alpha / rank) B A x: [..., inputs] -> [..., outputs]. A [rank, inputs], B [outputs, rank]."""

    def __init__(self, inputs: int, outputs: int, spec: LoraSpec) -> None:
        super().__init__()
        self.scale = spec.alpha / spec.rank
        self.A = nn.Parameter(torch.empty(spec.rank, inputs))
        self.B = nn.Parameter(torch.zeros(outputs, spec.rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x: Tensor, rows: slice = slice(None)) -> Tensor:
        """``rows``: of W, those that are wanted."""
        return F.linear(F.linear(x, self.A) * self.scale, self.B[rows])


def linear_maps(part: nn.Module) -> dict[str, nn.Linear]:
    """The linear maps of a part by their paths, whatever version of `transformers` made them."""
    # torch's own attention reads the weight of its output map without calling it: a subclass of Linear.
    return {path: layer for path, layer in part.named_modules() if type(layer) is nn.Linear}


def chosen_maps(part: nn.Module, spec: LoraSpec) -> dict[str, nn.Linear]:
    """The linear maps with a name that matches a pattern of ``spec.maps``."""
    return {
        path: layer
        for path, layer in linear_maps(part).items()
        if any(fnmatch.fnmatchcase(map_name(path), pattern) for pattern in spec.maps)
    }


def map_name(path: str) -> str:
    """A linear map's name, the same for every version of the library."""
    return stable_name(path + _WEIGHT).removesuffix(_WEIGHT)


class LowRankPart(nn.Module):
    """The terms of a part's linear maps, each at its map's path: ``<path>.A`` and ``<path>.B``."""

    def __init__(self, maps: Mapping[str, nn.Linear], spec: LoraSpec) -> None:
        super().__init__()
        for path, layer in maps.items():
            owner: nn.Module = self
            *owners, name = path.split(".")
            for inside in owners:
                if inside not in owner._modules:  # noqa: SLF001 - a name may also be a method of torch's
                    owner.add_module(inside, nn.Module())
                owner = owner.get_submodule(inside)
            owner.add_module(name, LowRank(layer.in_features, layer.out_features, spec))

    def attach(self, part: nn.Module) -> None:
        """Hook the low-rank terms onto the outputs of ``part``'s linear maps."""
        for path, term in self.named_modules():
            if isinstance(term, LowRank):
                layer = part.get_submodule(path)
                layer.__dict__["low_rank"] = term  # past torch's register: no tensor of the part
                # By the layer, not by ``term``: a deep copy of the model then adds the copy's own term.
                layer.register_forward_hook(lambda layer, given, result: result + layer.__dict__["low_rank"](given[0]))


def _term_of(layer: nn.Module) -> LowRank | None:
    term: LowRank | None = layer.__dict__.get("low_rank")
    return term


def some_rows(layer: nn.Linear, x: Tensor, rows: slice) -> Tensor:
    """The outputs ``rows`` of a linear map alone, with its low-rank term: [..., inputs] -> [..., rows]."""
    result = F.linear(x, layer.weight[rows], layer.bias[rows])
    term = _term_of(layer)
    return result if term is None else result + term(x, rows)


def parameters_read(module: nn.Module) -> Iterator[nn.Parameter]:
    """A module's parameters and those of its low-rank terms."""
    yield from module.parameters()
    for layer in module.modules():
        if (term := _term_of(layer)) is not None:
            yield from term.parameters()


def check_maps(part_maps: Mapping[str, Sequence[str]], spec: LoraSpec) -> None:
    """Check that each pattern matches a linear map, and each adapted part has a match.

    ``part_maps``: adapted part -> the names of its linear maps. Raises ModelError.
    """
    known = {name for names in part_maps.values() for name in names}
    for pattern in spec.maps:
        if not fnmatch.filter(known, pattern):
            raise ModelError(
                f"model.lora.maps: {pattern!r} fits no linear map of {', '.join(part_maps)}",
                remedy=f"Their names are: {', '.join(sorted(known))}.",
            )
    for part, names in part_maps.items():
        if not any(fnmatch.filter(names, pattern) for pattern in spec.maps):
            raise ModelError(
                f"model.lora.maps: none of {', '.join(spec.maps)} fits a linear map of {part}",
                remedy=f"Its maps are: {', '.join(names)}; name some, or leave the part out of model.lora.where.",
            )


Parts = Mapping[str, Mapping[str, np.ndarray]]


def merged(parts: Parts, spec: LoraSpec | msgspec.UnsetType) -> dict[str, Mapping[str, np.ndarray]]:
    """The parts with W + (alpha / rank) B A in place of each adapted W, and without the low-rank ones.

    As they are where ``spec`` is not set.
    """
    if spec is msgspec.UNSET:
        return dict(parts)
    adapters = {lora_part(part) for part in spec.parts}
    found = {part: tensors for part, tensors in parts.items() if part not in adapters}
    for part in filter(found.__contains__, spec.parts):
        terms = parts.get(lora_part(part), {})
        changed = {
            f"{path}{_WEIGHT}": _merged(parts[part][f"{path}{_WEIGHT}"], terms[f"{path}.A"], terms[f"{path}.B"], spec)
            for path in (name.removesuffix(".A") for name in terms if name.endswith(".A"))
        }
        if changed:
            found[part] = {**parts[part], **changed}
    return found


def _merged(weight: np.ndarray, a: np.ndarray, b: np.ndarray, spec: LoraSpec) -> np.ndarray:
    # In f64, so that the one rounding is that of the sum.
    added = spec.alpha / spec.rank * (b.astype(np.float64) @ a.astype(np.float64))
    return np.asarray((weight + added).astype(weight.dtype))
