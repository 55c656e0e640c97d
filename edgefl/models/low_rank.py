"""Low-rank terms of linear maps (LoRA, Hu et al., arXiv 2106.09685): y = W x + b + (alpha / rank) B A x, W frozen.

The terms are parts of their own, and the part they adapt keeps its tensors and their names: each linear map adds its
own. A begins as the paper's code has it (Kaiming uniform), B at zero, so that the first output is the base's. Where
devices have ranks of their own (FediLoRA, arXiv 2509.06984), A's rows and B's columns are cut into slices, a part each:
B A = sum_s B_s A_s over the slices that exist here, all with the scale of the whole rank.

Many rows x go through the one matrix W + (alpha / rank) B A, made for each pass: fewer FLOPs than a term of every row.
"""

from __future__ import annotations

import fnmatch
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.row_linear import InFile
from edgefl.models.spec import LoraSpec, is_lora, rank_slices, slices_of
from edgefl.models.tensor_names import stable_name

_WEIGHT = ".weight"
#: Largest weights that are added to their term: the sum is made beside them.
_MERGED_BYTES = 16 * 2**20


class LowRank(nn.Module):
    """Rank dimensions ``start`` to ``end`` of A [rank, inputs] and B [outputs, rank]."""

    def __init__(self, inputs: int, outputs: int, spec: LoraSpec, start: int) -> None:
        super().__init__()
        self.scale, end = spec.alpha / spec.rank, rank_slices(spec)[start]
        # Drawn as a whole, so that the slices together are what they would be uncut.
        whole = nn.init.kaiming_uniform_(torch.empty(spec.rank, inputs), a=math.sqrt(5))
        self.A = nn.Parameter(whole[start:end].clone())
        self.B = nn.Parameter(torch.zeros(outputs, end - start))


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
    """The terms of a part's linear maps, or a slice of each.

    They have their map's path: ``<path>.A`` and ``<path>.B``.
    """

    def __init__(self, maps: Mapping[str, nn.Linear], spec: LoraSpec, start: int = 0) -> None:
        super().__init__()
        for path, layer in maps.items():
            owner: nn.Module = self
            *owners, name = path.split(".")
            for inside in owners:
                if inside not in owner._modules:  # noqa: SLF001 - a name may also be a method of torch's
                    owner.add_module(inside, nn.Module())
                owner = owner.get_submodule(inside)
            owner.add_module(name, LowRank(layer.in_features, layer.out_features, spec, start))

    def attach(self, part: nn.Module) -> None:
        """Add the low-rank terms to the outputs of ``part``'s linear maps."""
        for path, term in self.named_modules():
            if isinstance(term, LowRank):
                layer = part.get_submodule(path)
                # Past torch's register: no tensor of the part. A deep copy has the copy's own term.
                layer.__dict__["low_rank"] = (*_slices_of(layer), term)
                layer.__dict__["forward"] = _Forward(layer)


class _Forward:
    """A layer's ``forward`` with its terms.

    The reference is weak: a bound method in its own object would keep a model, whoever has it, until it is collected.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer()
        if not isinstance(layer, nn.Linear):
            raise AssertionError("a layer that is gone")
        return some_rows(layer, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(memo[id(self._layer())])


def _slices_of(layer: nn.Module) -> tuple[LowRank, ...]:
    slices: tuple[LowRank, ...] = layer.__dict__.get("low_rank", ())
    return slices


def some_rows(layer: nn.Linear, x: Tensor, rows: slice = slice(None)) -> Tensor:
    """The outputs ``rows`` of a linear map, with its low-rank term: [..., inputs] -> [..., rows]."""
    slices = _slices_of(layer)
    if slices:
        # Joined before they are used: a product each, and the sum of these, would be as large as the map's outputs.
        a, b = (slices[0].A, slices[0].B) if len(slices) == 1 else (_joined(slices, "A", 0), _joined(slices, "B", 1))
        b, scale = b[rows], slices[0].scale
        if _merges(layer, x):
            result: Tensor = _Merged.apply(x, a, b, scale, layer, rows)  # type: ignore[no-untyped-call]
            return result
    if rows == slice(None):
        base = type(layer).forward(layer, x)
    else:
        base = F.linear(x, layer.weight[rows], None if layer.bias is None else layer.bias[rows])
        if isinstance(layer, InFile) and not layer.weight.requires_grad:
            layer.release(rows)
    return base + F.linear(F.linear(x, a) * scale, b) if slices else base


def _merges(layer: nn.Linear, x: Tensor) -> bool:
    """Whether x [..., inputs] is multiplied by W + s B A: W frozen, in f32, with fewer FLOPs."""
    weight, rows = layer.weight, x.numel() // max(1, layer.in_features)
    if any(p.requires_grad for p in layer.parameters()) or weight.nbytes > _MERGED_BYTES:
        return False
    # Forward and backward pass make the sum once each, and save one of the term's three passes over the rows. Without
    # a gradient, too, so that a piece encoded without and again with a graph gives the same digits.
    fewer = rows * (layer.in_features + layer.out_features) > 2 * weight.numel()
    # Mixed precision multiplies in bf16, in which the sum would lose the term.
    return fewer and F.linear(x.new_empty(0, 1), x.new_empty(1, 1)).dtype == weight.dtype


class _Merged(torch.autograd.Function):
    """y = (W + s B A) x + b with W and b frozen. The sum is made in each pass, and not kept in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, layer: nn.Linear, rows: slice) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.rest = scale, layer, rows
        bias = None if layer.bias is None else layer.bias[rows]
        return F.linear(x, _sum(a, b, *ctx.rest), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        outer, inner = gradients[0].reshape(-1, b.shape[0]), x.reshape(-1, a.shape[1])
        of_x = of_a = of_b = None
        if ctx.needs_input_grad[0]:
            of_x = (outer @ _sum(a, b, *ctx.rest)).view_as(x)
        if ctx.needs_input_grad[1]:
            of_a = ((outer @ b) * ctx.rest[0]).T @ inner
        if ctx.needs_input_grad[2]:
            of_b = outer.T @ ((inner @ a.T) * ctx.rest[0])
        return of_x, of_a, of_b, None, None, None


def _sum(a: Tensor, b: Tensor, scale: float, layer: nn.Linear, rows: slice) -> Tensor:
    result = torch.addmm(layer.weight[rows].detach(), b, a, alpha=scale)
    if isinstance(layer, InFile):
        layer.release(rows)
    return result


def _joined(slices: Sequence[LowRank], name: str, dim: int) -> Tensor:
    return torch.cat([one.get_parameter(name) for one in slices], dim)


def parameters_read(module: nn.Module) -> Iterator[nn.Parameter]:
    """A module's parameters and those of its low-rank terms."""
    yield from module.parameters()
    for layer in module.modules():
        for term in _slices_of(layer):
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
    found = {part: tensors for part, tensors in parts.items() if not is_lora(part)}
    for part in filter(found.__contains__, spec.parts):
        slices = [parts[name] for name in slices_of(spec, part) if name in parts]
        changed = {
            f"{path}{_WEIGHT}": _merged(parts[part][f"{path}{_WEIGHT}"], path, slices, spec)
            for path in (name.removesuffix(".A") for name in (slices[0] if slices else ()) if name.endswith(".A"))
        }
        if changed:
            found[part] = {**parts[part], **changed}
    return found


def _merged(weight: np.ndarray, path: str, slices: Sequence[Mapping[str, np.ndarray]], spec: LoraSpec) -> np.ndarray:
    # In f64, so that the one rounding is that of the sum.
    a, b = (
        np.concatenate([one[f"{path}.{name}"] for one in slices], axis, dtype=np.float64)
        for axis, name in enumerate("AB")
    )
    return np.asarray((weight + spec.alpha / spec.rank * (b @ a)).astype(weight.dtype))
