"""The parts after the encoders: projection heads (arXiv 2407.15426), fusion and the classifier."""

from __future__ import annotations

from torch import nn

from edgefl.models.spec import HeadSpec, ModelSpec


def projection_head(width: int, head: HeadSpec) -> nn.Module:
    """h [B, width] -> r [B, head.out]: (Linear → dropout → batch norm → ReLU) twice, Linear → batch norm.

    The last batch norm has no affine parameters. No Linear has a bias, since the batch norm behind it would cancel it.
    In training mode a batch needs two rows. Without a head (kind "none"): h itself.
    """
    if head.kind == "none":
        return nn.Identity()
    return nn.Sequential(
        *_hidden(width, head.width, head.dropout),
        *_hidden(head.width, head.width, head.dropout),
        nn.Linear(head.width, head.out, bias=False),
        nn.BatchNorm1d(head.out, affine=False),
    )


def fusion(spec: ModelSpec) -> nn.Module:
    """Concatenated projections [B, modalities * head.out] -> f [B, fusion_width], by an MLP."""
    inputs = len(spec.encoders) * spec.head.out
    return nn.Sequential(
        nn.Linear(inputs, spec.fusion_width), nn.GELU(), nn.Linear(spec.fusion_width, spec.fusion_width)
    )


def classifier(spec: ModelSpec) -> nn.Module:
    """f [B, fusion_width] -> logits [B, classes]."""
    return nn.Linear(spec.fusion_width, spec.classes)


def _hidden(inputs: int, outputs: int, dropout: float) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs, bias=False), nn.Dropout(dropout), nn.BatchNorm1d(outputs), nn.ReLU()]
