"""The device's own task by other projections than the model's (AproMFL, arXiv 2502.04400).

AproMFL's clustering model is the private copy of the heads, on devices without labels: it has the task's terms and the
contrast; every device's own model has the task's terms and the transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.lazy import F, torch
from edgefl.methods.objectives.margin import margin

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.models.staged import StagedModel
    from edgefl.training.forward import Forward


def task_loss(forward: Forward, values: Mapping[str, Tensor], has: Mapping[str, Tensor]) -> Tensor:
    """The device's own task by other projections: its labels through the classifier, else the margins of its pairs.

    A device without labels does not train its classifier. The margins are those of the recipe's term margin; without
    one the paper's.
    """
    if forward.labels is not None and _classifies(forward.model):
        return _classified(forward, values, has)
    margins = {name: float(value) for name, value in forward.objective.get("margin", {}).items() if name != "weight"}
    return margin(values, has, **margins)


def _classifies(model: StagedModel) -> bool:
    return "task" in model.parts_present and all(p.requires_grad for p in model.part("task").parameters())


def _classified(forward: Forward, values: Mapping[str, Tensor], has: Mapping[str, Tensor]) -> Tensor:
    labels = forward.labels
    if labels is None:
        return forward.nothing()
    zeros = torch.zeros_like(next(iter(values.values())))
    nobody = torch.zeros(forward.size, dtype=torch.bool, device=zeros.device)
    wanted = list(forward.model.spec.encoders)
    shown = {m: has.get(m, nobody) for m in wanted}
    fused = forward.model.fuse({m: values.get(m, zeros) for m in wanted}, shown, forward.tokens, forward.rows)
    summed = F.cross_entropy(forward.model.classify(fused), labels, ignore_index=-1, reduction="sum")
    return summed / (labels >= 0).sum().clamp(min=1)
