"""The joint fusion of FedMVP (arXiv 2406.11048, eqs 2-3): its place in a recipe (``edgefl.models.joint_fusion``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.errors import Problem
from edgefl.models.spec import EncoderSpec, JointSpec, ModelSpec
from edgefl.registry import Option, Recipe, chosen, offers, register
from edgefl.roles import Fusion

if TYPE_CHECKING:
    from torch import nn

#: Token width of FedMVP's joint module, whose encoders are 768 wide (ViT-B, BERT).
_JOINT_WIDTH = 256


def _one_projection(recipe: Recipe) -> list[Problem]:
    """Joint fusion has one projection for all modalities, so that none has a mapping that could be its own."""
    if not offers(recipe, "objective", "labels"):
        return []
    terms = [t.name for t in chosen("objective", recipe["objective"]) if "private_head" in t.method.auxiliaries]
    weights = [weight.name for weight in chosen("weight", recipe["weight"]) if weight.method.personal]
    text = "joint has one projection for all modalities, and {} keeps a mapping of each; set fusion: concat or mean"
    return [Problem("fusion", text.format(name)) for name in (*terms, *weights)]


def _joint(encoders: Mapping[str, EncoderSpec], *, width: float, heads: float, layers: float) -> dict[str, object]:
    """Width 0: that of the widest encoder, at most the paper's, so that small encoders get a small joint module."""
    if not width:
        widest = max((encoder.width for encoder in encoders.values()), default=_JOINT_WIDTH)
        width = max(1, min(_JOINT_WIDTH, widest) // int(heads)) * heads
    return {"joint": JointSpec(width=int(width), heads=int(heads), layers=int(layers), shared=True)}


def _joint_fusion(model: ModelSpec) -> nn.Module:
    from edgefl.models.joint_fusion import JointFusion  # loads torch

    return JointFusion(model)


register(
    Fusion(
        "joint",
        "cross-attention between the modalities' tokens, then self-attention; one projection for all (FedMVP, eqs 2-3)",
        {
            "width": Option(0, "token width; 0: that of the widest encoder, at most 256, the paper's", least=0),
            "heads": Option(4, "attention heads", least=1),
            "layers": Option(3, "self-attention layers", least=1),
        },
        build=_joint_fusion,
        tokens=True,
        shape=_joint,
        conflicts=_one_projection,
    ),
)
