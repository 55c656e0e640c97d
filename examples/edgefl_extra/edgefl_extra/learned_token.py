"""Learned token of an absent modality: one vector a modality, trained with the rest.

r_m = t_m [d] in the rows that lack modality m, of every device, fleet and bundle alike. Lee et al. (CVPR 2023, arXiv
2303.03369) learn prompts that tell a transformer what is missing; this is the plain form at the fusion's inputs.
t_m learns from samples that lack m, or have it hidden (``drop``): where neither is, it stays as it began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.registry import Option, register
from edgefl.roles import StandIn
from edgefl.training.fill import AtHand, Made

if TYPE_CHECKING:
    from torch import nn

    from edgefl.models.spec import ModelSpec


def build(model: ModelSpec, *, spread: float) -> nn.Module:
    """``tokens`` [M, d], in the order of the model's encoders."""
    import torch
    from torch import nn

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Parameter(spread * torch.randn(len(model.encoders), model.head.out))

    return Tokens()


def make(modality: str, given: AtHand) -> Made:
    """The modality's token in every row."""
    token = given.module.tokens[list(given.model.spec.encoders).index(modality)]
    return Made(given.zeros() + token, given.rows(True))


LEARNED_TOKEN = StandIn(
    "learned_token",
    "a learned vector a modality (after arXiv 2303.03369)",
    {
        "spread": Option(0.02, "standard deviation of its entries before training", least=0),
        "drop": Option(
            0.0, "probability that a complete sample trains with one of its modalities hidden", least=0, most=1
        ),
    },
    make=make,
    build=build,
    inferred="a vector that was trained along",
)
register(LEARNED_TOKEN)
