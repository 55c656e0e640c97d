"""The aggregated mapping teaches the local one (AproMFL, arXiv 2502.04400, equation 9).

ν KL(softmax(ê_local / T) ‖ softmax(ê_global / T)) over coordinates, ê = e/|e|,  ν = L_task(local) / L_task(global),
detached. D-A3: direction and T are parameters; as printed by default, T = 1. ν = 0 when the teacher's loss is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.errors import Problem
from edgefl.lazy import torch
from edgefl.methods.objectives.device_task import task_loss
from edgefl.methods.objectives.shared import Embeddings, Flags, Terms, blank, mean_of, mean_where
from edgefl.models.vectors import unit
from edgefl.registry import Objective, Options, Recipe, Temperature, TermWeight, offers, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


class ModelTransfer(Options, frozen=True):
    """Options of the transfer from the mapping received."""

    weight: TermWeight = 1.0
    temperature: Temperature = 1.0


def model_transfer(
    local: Embeddings,
    teacher: Embeddings,
    has: Flags,
    nu: Tensor | float,
    temperature: float = 1.0,
    *,
    reverse: bool = False,
) -> Tensor:
    """ν times the mean over the modalities at hand of the mean over their rows; no gradient reaches the teacher.

    ``local``, ``teacher``: embeddings [B, d] of the same samples, not normalised; ``nu``: see ``ratio``; ``reverse``:
    teacher ‖ local.
    """
    found = []
    for m, own in local.items():
        rows = unit(blank(own, has[m])), unit(blank(teacher[m].detach(), has[m]))
        divergence = kl_divergence(*rows, temperature, reverse=reverse)
        found.append(Terms(mean_where(divergence, has[m]), has[m].any()))
    return nu * mean_of(found, local)


def kl_divergence(local: Tensor, teacher: Tensor, temperature: float, *, reverse: bool = False) -> Tensor:
    """KL(softmax(local / T) ‖ softmax(teacher / T)) of coordinates [..., d] -> [...]; ``reverse``: the other way."""
    log_p, log_q = (x.div(temperature).log_softmax(dim=-1) for x in (local, teacher))
    if reverse:
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def ratio(local_loss: Tensor, teacher_loss: Tensor) -> Tensor:
    """ν = local / teacher of two scalars, detached; 0 when the denominator is."""
    local_loss, teacher_loss = local_loss.detach(), teacher_loss.detach()
    empty = teacher_loss == 0
    return torch.where(empty, 0.0, local_loss / torch.where(empty, 1.0, teacher_loss))


def loss(forward: Forward, *, temperature: float) -> Tensor:
    """The heads as received teach the device's own."""
    teacher = forward.teacher_projections()
    if not teacher:
        return forward.nothing()
    full, has = forward.spread
    own = {m: full[m] for m in teacher}
    with torch.no_grad():
        nu = ratio(task_loss(forward, own, has), task_loss(forward, teacher, has))
    return model_transfer(own, teacher, has, nu, temperature)


def _own_mapping(recipe: Recipe) -> list[Problem]:
    if offers(recipe, "weight", "personal"):
        return []
    advice = "set weight: relationship, or leave the term out"
    return [Problem("objective", f"model_transfer needs a mapping of the device's own; {advice}")]


register(
    Objective(
        "model_transfer",
        "the mapping received teaches the device's own: Kullback-Leibler divergence of unit vectors (AproMFL, eq. 9)",
        ModelTransfer,
        source="arXiv 2502.04400",
        conflicts=_own_mapping,
        loss=loss,
        teacher=True,
    )
)
