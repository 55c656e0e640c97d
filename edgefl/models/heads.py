"""The parts after the encoders: projection heads (arXiv 2407.15426), fusion, classifier, and the small MLPs.

Mean fusion: f = mean of the r_m shown.  Reconstruction: r_m ~ MLP(mean of the other r at hand) (MMiC's variant).
Matching (arXiv 2312.13508): logits = MLP(r_m) [C], or for each other modality o: r_o ~ MLP_o(r_m).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.label_spaces import spaces_in
from edgefl.models.spec import HeadSpec, ModelSpec, Norm, fused_width, shared_width, shares_projection, task_parts
from edgefl.registry import chosen


def projection_head(width: int, head: HeadSpec) -> nn.Module:
    """h [B, width] -> r [B, head.out]: (Linear → dropout → norm → ReLU) twice, Linear → norm without parameters.

    A Linear has a bias only where no norm follows (norm "none"): batch norm would cancel it, layer norm has its own.
    With batch norm a batch in training mode needs two rows. Without a head (kind "none"): h itself.
    """
    if head.kind == "none":
        return nn.Identity()
    bias = head.norm == "none"
    layers: list[nn.Module] = []
    for inputs in (width, head.width):
        linear = nn.Linear(inputs, head.width, bias=bias)
        layers += [linear, nn.Dropout(head.dropout), *_norm(head.norm, head.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(head.width, head.out, bias=bias), *_norm(head.norm, head.out, affine=False))


class HalfTanh(nn.Module):
    """tanh(x / 2), entry by entry."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 2)


def modality_head(spec: ModelSpec, modality: str) -> nn.Module:
    """The part ``head/<m>``: h [B, width] -> r [B, head.out], or to what the shared projection takes, if there is one.

    An encoder as wide as that needs none, and the part is empty.
    """
    width = spec.encoders[modality].width
    if not shares_projection(spec):
        return projection_head(width, spec.head)
    return nn.Identity() if width == shared_width(spec) else nn.Linear(width, shared_width(spec))


def fusion(spec: ModelSpec) -> nn.Module:
    """The module of the specification's fusion. Raises ConfigError for unknown options, ModelError for odd weights."""
    (one,) = chosen("fusion", {spec.fusion: spec.fusion_options})
    module: nn.Module = one.bind(one.method.build)(spec)
    if module.state_dict() and not one.method.weights:
        raise ModelError(
            f"fusion {one.name} has {', '.join(list(module.state_dict())[:3])}, and declares that it has no weights",
            remedy="Declare weights=True, so that they are trained and sent.",
        )
    return module


def stand_in(spec: ModelSpec) -> nn.Module:
    """The part ``missing``. Raises ConfigError for unknown options."""
    (one,) = chosen("missing", spec.stand_in or {})
    module: nn.Module = one.bind(one.method.build)(spec)
    return module


def concatenation(spec: ModelSpec) -> nn.Module:
    """Projections, each [B, head.out] -> f [B, fusion_width] by an MLP on their concatenation, stand-ins included.

    Bounded: f = tanh(norm(MLP) / 2), so that the dot products of PmcmFL's contrast are at most its width.
    """
    bound = [nn.LayerNorm(spec.fusion_width), HalfTanh()] if spec.bounded else []
    mlp = _mlp(len(spec.encoders) * spec.head.out, spec.fusion_width, spec.fusion_width)
    return Concatenation([*mlp, *bound])


class Concatenation(nn.ModuleList):
    """Layers, one after the other, on concatenated projections."""

    def forward(self, projections: Sequence[Tensor], shown: Sequence[Tensor] | None) -> Tensor:
        """``shown`` is not looked at."""
        fused = torch.cat(list(projections), dim=1)
        for layer in self:
            fused = layer(fused)
        return fused


class Mean(nn.Module):
    """Projections, each [B, d] -> the mean of those shown [B, d]."""

    def forward(self, projections: Sequence[Tensor], shown: Sequence[Tensor] | None) -> Tensor:
        """``mean_of_shown``."""
        return mean_of_shown(projections, shown)


def mean_of_shown(projections: Sequence[Tensor], shown: Sequence[Tensor] | None = None) -> Tensor:
    """Mean of the projections, each [B, d], over those that each row shows (``shown`` each [B]; None: all) [B, d].

    A row without any is zero; what stands in the rows that do not show one does not matter.
    """
    if shown is None and len(projections) == 1:
        return projections[0]
    stacked = torch.stack(list(projections))  # [M, B, d]
    if shown is None:
        return stacked.mean(dim=0)
    given = torch.stack(list(shown)).unsqueeze(2)  # [M, B, 1]
    return stacked.masked_fill(~given, 0.0).sum(dim=0) / given.sum(dim=0).clamp(min=1)


def classifier(spec: ModelSpec, part: str) -> nn.Module:
    """f [B, fused_width] -> logits [B, classes of the part]; two layers with a shared projection (FedMVP, eq. 8)."""
    classes = len(task_parts(spec)[part])
    if shares_projection(spec):
        return _mlp(spec.head.out, spec.head.out, classes)
    return nn.Linear(fused_width(spec), classes)


def among_own(logits: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
    """Logits [B, C] of each row among the classes of its label's set, the others the lowest finite number.

    ``labels`` [B], below 0: none, whose rows stay as they are; ``names`` [C]: of the classes, with one set or none at
    all they all stay.
    """
    spaces = spaces_in(names)
    if len(spaces) < 2:
        return logits
    number = {place: i for i, places in enumerate(spaces.values()) for place in places}
    of_class = torch.tensor([number[place] for place in range(len(names))], device=logits.device)
    own = of_class[labels.clamp(min=0)].unsqueeze(1)  # [B, 1]
    others = (of_class != own) & (labels >= 0).unsqueeze(1)
    return logits.masked_fill(others, torch.finfo(logits.dtype).min)


def reconstruction(spec: ModelSpec) -> nn.Module:
    """Mean of the other modalities' projections [B, d] -> this one's [B, d]."""
    return _mlp(spec.head.out, spec.head.out, spec.head.out)


def matcher(spec: ModelSpec, modality: str) -> nn.Module:
    """r [B, d] -> logits [B, classes]; for "prior" one MLP [B, d] -> [B, d] for each other modality, as ``to/<m>``."""
    d = spec.head.out
    if spec.matching == "classifier":
        return _mlp(d, d, spec.classes)
    # The prefix, because a module dictionary refuses its own attributes' names, which a modality may have.
    return nn.ModuleDict({f"to/{other}": _mlp(d, d, d) for other in spec.encoders if other != modality})


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


def _norm(norm: Norm, width: int, *, affine: bool = True) -> list[nn.Module]:
    """The normalisation of rows [B, width]; none for "none"."""
    if norm == "none":
        return []
    return [nn.BatchNorm1d(width, affine=affine) if norm == "batch" else nn.LayerNorm(width, elementwise_affine=affine)]
