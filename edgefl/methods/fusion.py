"""Fusion: how the modalities become one representation; and sharing: what their encoders share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.registry import Option, register
from edgefl.roles import Fusion, Sharing

if TYPE_CHECKING:
    from torch import nn


def _bounded(encoders: Mapping[str, EncoderSpec], *, bound: str) -> dict[str, object]:
    return {"bounded": bound == "tanh"}


def _concatenation(model: ModelSpec) -> nn.Module:
    from edgefl.models.heads import concatenation  # loads torch

    return concatenation(model)


def _mean(model: ModelSpec) -> nn.Module:
    from edgefl.models.heads import Mean  # loads torch

    return Mean()


_BOUND = Option(
    "none",
    "tanh: it ends in tanh(layer norm / 2), so that no entry is beyond 1 (PmcmFL's published code)",
    ("none", "tanh"),
)
register(
    Fusion(
        "concat",
        "concatenation and a two-layer network",
        {"bound": _BOUND},
        default=True,
        build=_concatenation,
        wide=True,
        shape=_bounded,
    ),
    Fusion("mean", "the mean of the projections at hand, no parameters", build=_mean, weights=False),
)
register(
    Sharing("separate", "each modality has an encoder of its own", default=True),
    Sharing("multiway", "attention is shared by the modalities, feed-forwards are not (arXiv 2312.13508)"),
    built_by_core=True,
)
