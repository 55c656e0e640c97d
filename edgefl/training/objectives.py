"""Terms of the local loss, as a closed dictionary: each takes a forward pass and its options, returns a scalar.

The equations are in ``edgefl.training.losses``, a file each. Here: what of the model each of them looks at. AproMFL's
clustering model is the private copy of the heads, on devices without labels: it has the task's terms and the
contrast; every device's own model has the task's terms and the transfers (arXiv 2502.04400).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch import Tensor

from edgefl.methods.objectives.clip import clip as clip_term
from edgefl.methods.objectives.clip import clip_loss
from edgefl.methods.objectives.cluster_contrast import cluster_contrast as cluster_contrast_term
from edgefl.methods.objectives.gmc import gmc as gmc_term
from edgefl.methods.objectives.margin import margin as margin_term
from edgefl.methods.objectives.mcm import mcm as mcm_term
from edgefl.methods.objectives.model_transfer import model_transfer as model_transfer_term
from edgefl.methods.objectives.model_transfer import ratio
from edgefl.methods.objectives.prototype_contrast import prototype_contrast as prototype_contrast_term
from edgefl.methods.objectives.prototype_transfer import prototype_transfer as prototype_transfer_term
from edgefl.methods.objectives.proximal import proximal as proximal_term
from edgefl.methods.objectives.proximal import regulariser as regulariser_term
from edgefl.methods.objectives.ram import ram as ram_term
from edgefl.methods.objectives.reconstruction import reconstruction as reconstruction_term
from edgefl.models.heads import mean_at_hand
from edgefl.models.staged import StagedModel
from edgefl.models.vectors import unit
from edgefl.prototypes.table import FUSED
from edgefl.training.forward import Forward

__all__ = ["OBJECTIVES", "Forward", "clip_loss", "total_loss"]

Options = Mapping[str, float | str]


def cross_entropy(forward: Forward, options: Options) -> Tensor:
    """CE(task(fusion([r_1; …; r_M])), y), the mean over the labelled samples; absent r_m are stand-ins."""
    if forward.labels is None:
        return forward.nothing()
    # A share without a known label is a mean of nothing: the sum over none, divided by one, is zero.
    summed = F.cross_entropy(forward.logits, forward.labels, ignore_index=-1, reduction="sum")
    return summed / (forward.labels >= 0).sum().clamp(min=1)


def modality_contrast(forward: Forward, options: Options) -> Tensor:
    """Mean over m of CE(cos(r_m, P_m) / τ, y), P_m [C, d] the global prototypes of modality m.

    Equation 7 of arXiv 2312.13508 with a class-level denominator (D-P4) and on each modality, so that matching by
    cosine works. Zero while there are no prototypes; classes without one are left out.

    No branch depends on values: the meta device prices it as it runs, and a GPU need not wait.
    """
    none = next(iter(forward.projected.values())).new_zeros(())
    total, terms = none, none
    for modality, projected in forward.projected.items():
        table, labels, rows = forward.auxiliary.tables.get(modality), forward.labels, forward.rows[modality]
        if table is None or labels is None:
            continue
        own = labels if rows is None else labels[rows]
        known = (own >= 0) & table.valid[own.clamp(min=0)]
        cosine = unit(projected) @ unit(table.rows).T
        # The lowest finite number, not -inf: a row with no class at all would be NaN, weight zero or not.
        logits = (cosine / float(options["temperature"])).masked_fill(~table.valid, torch.finfo(cosine.dtype).min)
        summed = F.cross_entropy(logits, torch.where(known, own, -1), ignore_index=-1, reduction="sum")
        total = total + summed / known.sum().clamp(min=1)
        terms = terms + known.any()
    return total / terms.clamp(min=1) + forward.nothing()


def clip(forward: Forward, options: Options) -> Tensor:
    """Contrast of the modalities' projections over the samples that have both of a pair."""
    return clip_term(*forward.spread, float(options["temperature"]))


def margin(forward: Forward, options: Options) -> Tensor:
    """Pairs above one cosine, others below another."""
    return margin_term(*forward.spread, float(options["positive"]), float(options["negative"]))


def prototype_contrast(forward: Forward, options: Options) -> Tensor:
    """The fused representation against the fused prototypes; zero while there are none."""
    table = forward.auxiliary.tables.get(FUSED)
    if table is None or forward.labels is None:
        return forward.nothing()
    by_class = options["negatives"] == "classes"
    return prototype_contrast_term(
        forward.fused, table, forward.labels, float(options["temperature"]), class_level=by_class
    )


def cluster_contrast(forward: Forward, options: Options) -> Tensor:
    """The private copies' task and contrast by local cluster; zero where there are none."""
    values, has = forward.private_projections()
    if not values:
        return forward.nothing()
    task = _task(forward, values, has)
    if forward.pseudo_labels is None:
        return task
    return task + cluster_contrast_term(values, has, forward.pseudo_labels, float(options["temperature"]))


def prototype_transfer(forward: Forward, options: Options) -> Tensor:
    """Both halves of the global prototype pairs are seen alike, by one modality too; zero while there are none."""
    tables = {m: forward.auxiliary.tables[m] for m in forward.model.spec.encoders if m in forward.auxiliary.tables}
    return prototype_transfer_term(*forward.spread, tables, float(options["temperature"]))


def model_transfer(forward: Forward, options: Options) -> Tensor:
    """The heads as received teach the device's own."""
    teachers = forward.teacher_projections()
    if not teachers:
        return forward.nothing()
    full, has = forward.spread
    own = {m: full[m] for m in teachers}
    with torch.no_grad():
        nu = ratio(_task(forward, own, has), _task(forward, teachers, has))
    return model_transfer_term(own, teachers, has, nu, float(options["temperature"]))


def regulariser(forward: Forward, options: Options) -> Tensor:
    """The heads stay near their private copies."""
    own: dict[str, Tensor] = {}
    anchors: dict[str, Tensor] = {}
    for m, private_head in forward.auxiliary.private_heads.items():
        own |= {f"{m}/{name}": p for name, p in forward.model.part(f"head/{m}").named_parameters()}
        anchors |= {f"{m}/{name}": p for name, p in private_head.named_parameters()}
    return regulariser_term(own, anchors, 1.0) if own else forward.nothing()


def mcm(forward: Forward, options: Options) -> Tensor:
    """The joint representation matches each modality's."""
    full, has = forward.spread
    form = options["form"] == "ntxent"
    return mcm_term(forward.fused, full, has, float(options["temperature"]), ntxent=form)


def ram(forward: Forward, options: Options) -> Tensor:
    """The joint representation follows a modality from which the classifier does better; both as unit vectors."""
    if forward.labels is None:
        return forward.nothing()
    full, has = forward.spread
    known = forward.labels >= 0
    labels = forward.labels.clamp(min=0)
    joint, own = unit(forward.fused), {m: unit(r) for m, r in full.items()}
    with torch.no_grad():
        ce, *each = (
            F.cross_entropy(forward.model.classify(x), labels, reduction="none") for x in (joint, *own.values())
        )
    return ram_term(joint, own, {m: rows & known for m, rows in has.items()}, ce, dict(zip(own, each, strict=True)))


def gmc(forward: Forward, options: Options) -> Tensor:
    """Each modality's projection against the joint one."""
    return gmc_term(forward.fused, *forward.spread, float(options["temperature"]))


def proximal(forward: Forward, options: Options) -> Tensor:
    """The trained parameters stay near those received."""
    own = {str(i): parameter for i, (parameter, _) in enumerate(forward.auxiliary.received)}
    anchors = {str(i): value for i, (_, value) in enumerate(forward.auxiliary.received)}
    return proximal_term(own, anchors, 1.0) if own else forward.nothing()


def reconstruction(forward: Forward, options: Options) -> Tensor:
    """Each modality's projection predicted from the others' a sample has; the projections themselves do not move."""
    full, has = forward.spread
    predicted = {}
    for m in full:
        others = {other: r.detach() for other, r in full.items() if other != m}
        if others:
            given = mean_at_hand(others, {other: has[other] for other in others})
            predicted[m] = forward.model.reconstruct(m, given)
    return reconstruction_term(predicted, full, has) if predicted else forward.nothing()


def _task(forward: Forward, values: Mapping[str, Tensor], has: Mapping[str, Tensor]) -> Tensor:
    """The device's own task by other projections: its labels through the classifier, else the margins of its pairs.

    A device without labels does not train its classifier. The margins are those of the recipe's term margin; without
    one the paper's.
    """
    if forward.labels is not None and _classifies(forward.model):
        return _classified(forward, values, has)
    margins = {name: float(value) for name, value in forward.objective.get("margin", {}).items() if name != "weight"}
    return margin_term(values, has, **margins)


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


OBJECTIVES: dict[str, Callable[[Forward, Options], Tensor]] = {
    "cross_entropy": cross_entropy,
    "clip": clip,
    "margin": margin,
    "modality_contrast": modality_contrast,
    "prototype_contrast": prototype_contrast,
    "cluster_contrast": cluster_contrast,
    "prototype_transfer": prototype_transfer,
    "model_transfer": model_transfer,
    "regulariser": regulariser,
    "mcm": mcm,
    "ram": ram,
    "gmc": gmc,
    "proximal": proximal,
    "reconstruction": reconstruction,
}


def total_loss(forward: Forward, objective: Mapping[str, Options]) -> Tensor:
    """Sum of weight x term."""
    terms = [float(options["weight"]) * OBJECTIVES[name](forward, options) for name, options in objective.items()]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]
