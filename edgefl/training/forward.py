"""Forward pass of a batch as the terms of the loss see it: projections, stand-ins, the joint representation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.data.dataset import Dataset
from edgefl.errors import ModelError
from edgefl.models.encoder import TokenState
from edgefl.models.heads import among_own
from edgefl.models.parts import load_module, module_tensors, named_parameters
from edgefl.models.spec import PROTOTYPES, answered
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.plan.training_samples import clusters_apart
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher, Table, in_torch
from edgefl.prototypes.pairs import LOCAL_CLUSTERS, Local, local_pairs
from edgefl.prototypes.table import from_tensors, of_several, to_tensors
from edgefl.registry import chosen, method
from edgefl.training.embeddings import device_of, own_modalities, projections_of
from edgefl.training.fill import AtHand, Filled, fill, hide, matcher_of


@dataclass(frozen=True)
class Auxiliary:
    """State for loss terms besides the model, as far as used.

    ``tables``: global prototypes by modality; ``initial``: initial prototypes, before there are any; ``matcher``:
    matching of samples to prototypes. ``private_heads``: modality -> copy of the head, trained but not sent;
    ``teachers``: modality -> frozen head as received. ``received``: "part|tensor" -> (parameter, its received value)
    for trained parts; ``kept``: term -> the same keys -> the device's stored value, zeros at first.
    """

    tables: Mapping[str, Table] = field(default_factory=dict)
    private_heads: Mapping[str, nn.Module] = field(default_factory=dict)
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)
    received: Mapping[str, tuple[nn.Parameter, Tensor]] = field(default_factory=dict)
    matcher: Matcher = DEFAULT_MATCHER
    initial: Mapping[str, Table] = field(default_factory=dict)
    kept: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def extra(self) -> list[nn.Parameter]:
        """Parameters that are trained along and belong to no part of the model."""
        return [parameter for head in self.private_heads.values() for parameter in head.parameters()]


def copied(head: nn.Module, *, trained: bool) -> nn.Module:
    """A head's private copy (trained) or the teacher made of it (frozen, in evaluation mode)."""
    return copy.deepcopy(head).requires_grad_(trained).train(trained)


@dataclass
class Forward:
    """One batch. ``encoded[m]``: h [n_m, D]; ``projected[m]``: r [n_m, d]; ``rows[m]``: which of the B rows, None: all.

    ``labels`` [B], -1: none; ``targets`` [B], NaN: none, of a numeric target; ``sets`` [B, C]: 1 for each class of a
    sample that may have several; ``pseudo_labels`` [B]: class or local cluster, -1: none; ``missing``: the slot's
    choice and its options; ``tokens``: for joint fusion; ``objective``: the recipe's terms and their options, for terms
    that hold another one's.
    """

    model: StagedModel
    size: int
    encoded: Mapping[str, Tensor]
    projected: Mapping[str, Tensor]
    rows: Mapping[str, Tensor | None]
    labels: Tensor | None
    missing: tuple[str, Mapping[str, float | str]]
    auxiliary: Auxiliary = field(default_factory=Auxiliary)
    pseudo_labels: Tensor | None = None
    tokens: Mapping[str, TokenState] | None = None
    objective: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    targets: Tensor | None = None
    sets: Tensor | None = None

    @cached_property
    def spread(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Projections as [B, d] with zeros where there are none, and which rows have them [B]."""
        return self._spread(self.projected)

    def private_projections(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """As ``spread``, by the private copies of the heads."""
        heads = self.auxiliary.private_heads
        return self._spread({m: heads[m](h) for m, h in self.encoded.items() if m in heads})

    def teacher_projections(self) -> dict[str, Tensor]:
        """Projections as the first of ``spread``, by the heads as they were received; no gradient."""
        heads = self.auxiliary.teachers
        with torch.no_grad():
            return self._spread({m: heads[m](h) for m, h in self.encoded.items() if m in heads})[0]

    @cached_property
    def at_hand(self) -> dict[str, Tensor]:
        """Which rows show a modality to the fusion [B]: those that have it and, with ``drop``, have it not hidden."""
        _, has = self.spread
        drop = float(self.missing[1].get("drop", 0.0))
        return hide(has, drop) if drop and len(has) == len(self.model.spec.encoders) else has

    @cached_property
    def all_shown(self) -> bool:
        """True if every row shows every modality of the model."""
        complete = all(m in self.projected and self.rows[m] is None for m in self.model.spec.encoders)
        return complete and not self.missing[1].get("drop")

    @cached_property
    def filled(self) -> Filled:
        """Every modality of the model, with stand-ins where a row does not show it."""
        if self.all_shown:
            return Filled(self.projected, {}, {})
        name, options = self.missing
        tables, matcher = self.auxiliary.tables or self.auxiliary.initial, self.auxiliary.matcher
        given = AtHand(self.spread[0], self.at_hand, self.model, tables, self.labels, options, matcher)
        return fill(method("missing", name).make, given)

    @cached_property
    def fused(self) -> Tensor:
        """f [B, fused width]: the joint representation."""
        has = {} if self.all_shown and self.tokens is None else self.at_hand
        return self.model.fuse(self.filled.values, has, self.tokens, self.rows, self.filled.counted)

    @cached_property
    def logits(self) -> Tensor:
        """[B, C]."""
        return self.classify(self.fused)

    def classify(self, fused: Tensor) -> Tensor:
        """f [B, fused width] -> logits [B, C]; of a labelled row among the classes of its label's set."""
        logits = self.model.classify(fused)
        return logits if self.labels is None else among_own(logits, self.labels, self.model.spec.label_names)

    @property
    def classified(self) -> Tensor | None:
        """The logits if a term has asked for them."""
        return self.__dict__.get("logits")

    def nothing(self) -> Tensor:
        """Zero, whatever the projections hold, but part of the graph, so that ``backward`` has a way to go."""
        return next(iter(self.projected.values()))[:0].sum()

    def _spread(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        full, has = {}, {}
        for m, own in values.items():
            rows = self.rows[m]
            has[m] = torch.full((self.size,), rows is None, dtype=torch.bool, device=own.device)
            full[m] = own
            if rows is not None:
                has[m] = has[m].index_fill(0, rows, True)
                full[m] = own.new_zeros(self.size, own.shape[1]).index_copy(0, rows, own)
        return full, has


Tensors = Mapping[str, np.ndarray]
#: What a private copy is called among the parts a device keeps.
PRIVATE_HEAD = "twin/"
#: Before a term's name: what it keeps, there.
KEPT = "objective/"


def auxiliary_of(job: Job, model: StagedModel, parts: Mapping[str, Tensors], kept: Mapping[str, Tensors]) -> Auxiliary:
    """Auxiliary state of the recipe's objective terms.

    ``parts``: as received; ``kept``: parts of this device's last round. A device without labels has a private head
    (AproMFL's clustering model): it starts as the first mapping received, is trained along and stays on the device. A
    teacher is the mapping as received in this round; the device's own mapping goes on from its own copy.
    """
    terms = [term.method for term in chosen("objective", job.slots.objective)]
    heads = [m for m in job.model.encoders if f"head/{m}" in job.stage.trained]
    private_heads: dict[str, nn.Module] = {}
    teachers: dict[str, nn.Module] = {}
    for m in heads:
        head = model.part(f"head/{m}")
        if clusters_apart(job.slots, job.stage):
            private_heads[m] = copied(head, trained=True)
            load_module(PRIVATE_HEAD + m, private_heads[m], kept.get(PRIVATE_HEAD + m, parts[f"head/{m}"]))
        if any("teacher" in term.auxiliaries for term in terms):
            teachers[m] = copied(head, trained=False)
            load_module(f"head/{m}", teachers[m], parts[f"head/{m}"])
    received = received_of(job, model)
    tables = tables_of(parts, device_of(model))
    initial = {} if tables else initial_tables(job, device_of(model))
    matcher = matcher_of(job.slots, {}, job.k)
    return Auxiliary(tables, private_heads, teachers, received, matcher, initial, kept_of(job, received, kept))


def received_of(job: Job, model: StagedModel) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """The trained parameters as received, where a term needs them."""
    terms = [term.method for term in chosen("objective", job.slots.objective)]
    if not any("received" in term.auxiliaries or term.keep for term in terms):
        return {}
    return {
        f"{part}|{name}": (parameter, parameter.detach().clone())
        for part in job.stage.trained
        for name, parameter in named_parameters(model.part(part)).items()
    }


def kept_of(
    job: Job, received: Mapping[str, tuple[nn.Parameter, Tensor]], kept: Mapping[str, Tensors]
) -> dict[str, dict[str, Tensor]]:
    """What terms kept of each trained parameter, of the parts ``kept`` by the device."""
    found = {}
    for term in chosen("objective", job.slots.objective):
        if term.method.keep is not None:
            own = kept.get(KEPT + term.name, {})
            found[term.name] = {
                name: torch.from_numpy(np.array(own[name])).to(value) if name in own else torch.zeros_like(value)
                for name, (_, value) in received.items()
            }
    return found


def keeping(job: Job, auxiliary: Auxiliary, kept: Mapping[str, Tensors]) -> dict[str, dict[str, np.ndarray]]:
    """What terms keep of a round, as parts; of parameters that it did not train what they kept before.

    Raises ModelError, naming the term, for an array of another shape.
    """
    found = {}
    for term in chosen("objective", job.slots.objective):
        if term.method.keep is not None:
            keep, own = term.bind(term.method.keep), dict(kept.get(KEPT + term.name, {}))
            for name, (parameter, value) in auxiliary.received.items():
                before = auxiliary.kept[term.name][name]
                arrays = (t.detach().cpu().numpy() for t in (before, value, parameter))
                own[name] = np.asarray(keep(*arrays), np.float32)
                if own[name].shape != value.shape:
                    raise ModelError(
                        f"objective: {term.name} keeps {list(own[name].shape)} of {name}, which is {list(value.shape)}",
                        remedy="Mend the method's keep, or leave the term out.",
                    )
            found[KEPT + term.name] = own
    return found


def tables_of(parts: Mapping[str, Tensors], device: torch.device) -> dict[str, Table]:
    """The global prototypes that were received; none in the first round."""
    return in_torch(from_tensors(parts[PROTOTYPES]), device) if PROTOTYPES in parts else {}


def initial_tables(job: Job, device: torch.device) -> dict[str, Table]:
    """Tables before the first prototypes, by the run's seed, alike on every device; {} where there are none."""
    slot = chosen("prototypes", job.slots.prototypes)[0]
    if slot.method.start is None:
        return {}
    return in_torch(slot.bind(slot.method.start)(job.model, np.random.default_rng(job.hyper.seed)), device)


def private_head_tensors(auxiliary: Auxiliary) -> dict[str, dict[str, np.ndarray]]:
    """The private copies, as parts to keep."""
    return {PRIVATE_HEAD + m: module_tensors(head) for m, head in auxiliary.private_heads.items()}


def local_prototypes(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator
) -> Local:
    """Adaptive prototypes of this device and the class or cluster of each sample, by the private heads if there are
    any. They are made of the labelled samples, without labels of the complete ones.

    ``model`` and the heads end in the modes they had.
    """
    options = chosen("prototypes", job.slots.prototypes)[0].options
    classes = answered(job.model, job.stage.trained) or range(job.model.classes)
    labels = None
    if dataset.labels is not None and classes:
        place = np.full(job.model.classes + 1, -1)
        place[list(classes)] = range(len(classes))
        labels = place[dataset.labels]
    if labels is not None and (labels >= 0).any():
        teaching = labels >= 0
    else:
        teaching = np.logical_and.reduce([dataset.has(m) for m in own_modalities(job, dataset)])
    projections = projections_of(job, model, dataset, auxiliary.private_heads, teaching)
    has = {m: dataset.has(m) for m in projections}
    least = float(options.get("min_count", 1))  # a cluster of fewer samples does not leave the device
    clusters = max(1, min(int(options.get("local_clusters", LOCAL_CLUSTERS)), int(teaching.sum() // least)))
    return local_pairs(projections, has, labels, len(classes), rng, clusters=clusters)


def pseudo_labels_of(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator
) -> np.ndarray | None:
    """Each sample's local cluster [N] for this round, where a private head is trained by it."""
    if not clusters_apart(job.slots, job.stage):
        return None
    return local_prototypes(job, model, auxiliary, dataset, rng).labels


def local_tables(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator
) -> dict[str, np.ndarray] | None:
    """The tensors of the part "prototypes" by the recipe's slot; None without one. A table without rows is left out."""
    slot = chosen("prototypes", job.slots.prototypes)[0]
    if slot.method.local is None:
        return None
    found = slot.bind(slot.method.local)(job, model, auxiliary, dataset, rng)
    enough = {m: of_several(table, float(slot.options["min_count"])) for m, table in found.items()}
    tables = {m: table for m, table in enough.items() if table.present.any()}
    return to_tensors(tables) if tables else None
