"""Gated multimodal fusion (GMU: Arevalo et al. 2017, arXiv 1702.01992): a gate a modality and entry.

h_m = tanh(W_m r_m), z = gates of V [r_1; …; r_M], f = sum over m of z_m * h_m, entry by entry.
sigmoid: each gate by itself, the paper's unit of M modalities.  softmax: the gates of an entry sum to 1 over the
modalities shown; of two that is the paper's bimodal unit, whose gates are z and 1 - z.
Where a modality is not shown its gate is 0, and the other gates see zeros in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.registry import Option, register
from edgefl.roles import Fusion

if TYPE_CHECKING:
    from torch import nn

    from edgefl.models.spec import ModelSpec


def build(model: ModelSpec, *, gate: str) -> nn.Module:
    """The unit of a model's modalities."""
    import torch
    from torch import Tensor, nn

    class Gated(nn.Module):
        """M projections [B, d], and which rows show each [B] -> f [B, fusion_width]."""

        def __init__(self, modalities: int, d: int, width: int) -> None:
            super().__init__()
            self.hidden = nn.ModuleList(nn.Linear(d, width) for _ in range(modalities))
            self.gates = nn.Linear(modalities * d, modalities * width)

        def forward(self, projections: list[Tensor], shown: list[Tensor] | None) -> Tensor:
            r = torch.stack(projections, dim=1)  # [B, M, d]
            if shown is not None:
                there = torch.stack(shown, dim=1).unsqueeze(2)  # [B, M, 1]
                r = torch.where(there, r, 0.0)
            h = torch.stack([torch.tanh(own(r[:, m])) for m, own in enumerate(self.hidden)], dim=1)  # [B, M, W]
            z = self.gates(r.flatten(1)).view_as(h)
            if gate == "sigmoid":
                z = z.sigmoid()
            else:
                z = (z if shown is None else z.masked_fill(~there, -1e4)).softmax(dim=1)
            return ((z if shown is None else torch.where(there, z, 0.0)) * h).sum(dim=1)

    return Gated(len(model.encoders), model.head.out, model.fusion_width)


register(
    Fusion(
        "gated",
        "gates weigh the modalities in each entry (GMU, arXiv 1702.01992)",
        {
            "gate": Option(
                "softmax", "whether the gates of an entry sum to 1 over the modalities", ("softmax", "sigmoid")
            )
        },
        build=build,
        wide=True,
    )
)
