"""Contrast of fused representations with the global fusion prototypes (PmcmFL, arXiv 2312.13508, equation 7).

mean_s CE(logits_s, s),  logits_si = h_s·P_{y_i} / τ over the samples i of the batch; neither h nor P is normalised.
D-P4: samples of the own class count as negatives, as printed; option: one logit per class, CE(h_s·P_c / τ, y_s).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch import Tensor

from edgefl.methods.objectives.shared import blank, masked
from edgefl.prototypes.torch_mask import Table


def prototype_contrast(
    h: Tensor, table: Table, labels: Tensor, temperature: float = 0.07, *, class_level: bool = False
) -> Tensor:
    """For h [B, d], prototypes ``table`` [C, d] and labels [B], below 0: unknown.

    Rows without a label, and rows whose class has no prototype, are left out on both sides; 0 when none is left.
    """
    own = labels.clamp(min=0)
    known = (labels >= 0) & table.valid[own]
    if class_level:
        against, keep, target = table.rows, table.valid, labels
    else:
        against, keep, target = table.rows[own], known, torch.arange(len(labels), device=labels.device)
    logits = masked(blank(h, known) @ against.T / temperature, keep.unsqueeze(0))
    summed = F.cross_entropy(logits, torch.where(known, target, -1), ignore_index=-1, reduction="sum")
    return summed / known.sum().clamp(min=1)
