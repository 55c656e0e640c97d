"""The parts after the encoders: projection heads (arXiv 2407.15426), fusion, classifier, and the small MLPs.

Mean fusion: f = mean of the r_m at hand.  Reconstruction: r_m ~ MLP(mean of the other r at hand) (MMiC's variant).
Matching (arXiv 2312.13508): logits = MLP(r_m) [C], or for each other modality o: r_o ~ MLP_o(r_m).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from edgefl.models.joint_fusion import JointFusion
from edgefl.models.spec import HeadSpec, ModelSpec, Norm, fused_width, fuses_tokens, shared_width, shares_projection


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
    """Fusion module. "concat": concatenated projections [B, modalities * head.out] -> f [B, fusion_width], by an MLP.

    Bounded: f = tanh(norm(MLP) / 2), so that the dot products of PmcmFL's contrast are at most its width.
    """
    if fuses_tokens(spec):
        return JointFusion(spec)
    mlp = _mlp(len(spec.encoders) * spec.head.out, spec.fusion_width, spec.fusion_width)
    return nn.Sequential(*mlp, nn.LayerNorm(spec.fusion_width), HalfTanh()) if spec.bounded else mlp


def mean_at_hand(projections: Mapping[str, Tensor], has: Mapping[str, Tensor] | None = None) -> Tensor:
    """Mean of the projections, each [B, d], over the modalities that each row has (``has[m]`` [B]; None: all) [B, d].

    A row without any is zero; what stands in the rows that lack a modality does not matter.
    """
    stacked = torch.stack(list(projections.values()))  # [M, B, d]
    if has is None:
        return stacked.mean(dim=0)
    given = torch.stack([has[m] for m in projections]).unsqueeze(2)  # [M, B, 1]
    return stacked.masked_fill(~given, 0.0).sum(dim=0) / given.sum(dim=0).clamp(min=1)


def classifier(spec: ModelSpec) -> nn.Module:
    """f [B, fused_width] -> logits [B, classes]; two layers where the projection is shared (FedMVP, eq. 8)."""
    if shares_projection(spec):
        return _mlp(spec.head.out, spec.head.out, spec.classes)
    return nn.Linear(fused_width(spec), spec.classes)


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
