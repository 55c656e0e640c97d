"""Evaluation: the global model on the test set, under every condition; a device's own model on its hold-out.

Conditions: all modalities, each alone and, with three or more, each pair; absent modalities are filled in by each mask:
zeros; with prototypes, mixtures of those of the classes that match; with parts ``reconstruct/<m>``, reconstructions.

What the zero mask shows of a recipe that completes its data (FedMVP): a generator completed the training samples of the
devices, and there is none here, so that the figure is that of a sample whose other modality could not be made. Joint
fusion is shown the tokens at hand and, for the rest, the one token of an absent modality, as training shows it the
samples it could not complete; a device that could complete all of them has not trained that token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch import Tensor

from edgefl.data import arrays
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load
from edgefl.errors import DataError, ModelError
from edgefl.models.encoder import TokenState
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import PROTOTYPES, ModelSpec, encodes_together
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Job, Slots, Stage
from edgefl.plan.training_samples import needs_pairs
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher, Networks, Table, in_torch
from edgefl.prototypes.table import ClassMeans, from_tensors
from edgefl.records import EvaluationRow
from edgefl.registry import chosen, default, method, methods
from edgefl.training.batches import input_of
from edgefl.training.embeddings import BATCH, device_of, embeddings, take_statistics, to_numpy
from edgefl.training.fill import BY_MATCH, AtHand, Make, at_inference, fill, matcher_of
from edgefl.training.flop_cache import counted, kind_of_step, linear_in
from edgefl.training.metrics import classification, pairs, retrieval, same_items

#: What a model can be judged by: labels, and pairs of modalities.
TASKS = frozenset({"classification", "retrieval"})
Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TestSet:
    """The coordinator's own labelled (or paired) samples."""

    __test__ = False  # not a test case, whatever its name says to a collector
    data: Dataset

    @classmethod
    def load(cls, path: str, model: ModelSpec) -> TestSet:
        """Read a test set (.npz or a folder with manifest.jsonl). Raises DataError."""
        data = load(Path(path), modalities=dict(model.encoders), label_names=model.label_names)
        if len(data) == 0:
            raise DataError(f"{path} holds no test samples")
        return cls(data)


@dataclass(frozen=True)
class _Judged:
    """A model, the samples, and what stand-ins for absent modalities are made of.

    ``names``: the modalities at hand. ``alone[m]``: projections [N, d] of m encoded by itself, zeros in rows that lack
    m; empty where neither retrieval nor classification reads them.
    """

    model: StagedModel
    data: Dataset
    names: tuple[str, ...]
    depth: int
    alone: Mapping[str, np.ndarray]
    tables: Mapping[str, Table]
    matcher: Matcher
    networks: Networks

    def logits(self, available: Sequence[str], rows: np.ndarray, mask: str) -> np.ndarray:
        """[n, C] of the samples ``rows``, which all have ``available``, given only these; the rest by ``mask``."""
        starts = range(0, len(rows), BATCH)
        with torch.no_grad():
            return np.concatenate([self._batch(available, rows[start : start + BATCH], mask) for start in starts])

    def _batch(self, available: Sequence[str], rows: np.ndarray, mask: str) -> np.ndarray:
        r, tokens = self._encoded(available, rows)
        given = AtHand(r, {}, self.model, self.tables, None, BY_MATCH, self.matcher, self.networks)
        make = method("missing", mask if len(available) < len(self.model.spec.encoders) else default("missing")).make
        return to_numpy(logits_of(given, make, tokens))

    def _encoded(
        self, available: Sequence[str], rows: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, TokenState] | None]:
        """Projections [n, d] and, where the fusion reads them, tokens: encoded with what else a row is given."""
        device = device_of(self.model)
        if not encodes_together(self.model.spec):
            return {m: torch.from_numpy(self.alone[m][rows]).to(device) for m in available}, None
        inputs = {m: input_of(self.data, m, rows, device) for m in available}
        states = self.model.encode_batch_tokens(inputs, dict.fromkeys(inputs), len(rows), self.depth)
        pooled = {m: self.model.pool_tokens(m, state) for m, state in states.items()}
        return {m: self.model.project(m, h) for m, h in pooled.items()}, states


def logits_of(given: AtHand, make: Make, tokens: Mapping[str, TokenState] | None = None) -> Tensor:
    """[B, C] of samples that all have exactly the modalities ``given``, with stand-ins by ``make`` for the others."""
    filled = fill(make, given)
    has = {m: given.rows(True) for m in given.full}
    return given.model.classify(given.model.fuse(filled.values, has, tokens, counted=filled.counted))


def evaluate(
    model: ModelSpec,
    stage: Stage,
    parts: Mapping[str, Tensors],
    test: TestSet,
    *,
    prototypes: bool,
    tasks: frozenset[str] | None = None,
    matcher: Matcher = DEFAULT_MATCHER,
    networks: Networks | None = None,
    statistics: bool = False,
) -> list[EvaluationRow]:
    """Rows of the model made of ``parts``: classification under every condition, then retrieval of every pair.

    ``tasks``: None means classification for a model with classes, else retrieval. ``prototypes``: also with the
    prototype mask, matched by ``matcher`` (``networks``: those a trained one needs). A model with parts that
    reconstruct is also shown with what they make. ``statistics``: those of batch norm are first taken on the inputs of
    the test set. Raises DataError for classification without labels, ModelError for a task the model was not made for.
    """
    asked = _tasks(model, tasks)
    built = build(model, stage.present)
    for name in stage.present:
        load_part(built, name, parts[name])
    built.eval()
    if statistics:
        take_statistics(built, test.data, stage.depth)
    names = tuple(m for m in model.encoders if test.data.has(m).any())
    tables = from_tensors(parts[PROTOTYPES]) if prototypes and PROTOTYPES in parts else {}
    alone = _alone(built, test.data, names, stage.depth, asked)
    judged = _Judged(built, test.data, names, stage.depth, alone, in_torch(tables), matcher, networks or {})
    rows: list[EvaluationRow] = []
    if "classification" in asked:
        rows += _classification(judged)
    if "retrieval" in asked:
        rows += _retrieval(judged)
    return rows


def judge(
    model: StagedModel,
    dataset: Dataset,
    stage_depth: int,
    tables: Mapping[str, ClassMeans],
    tasks: frozenset[str] | None,
    modalities: Sequence[str],
    *,
    mask: str | None = None,
    matcher: Matcher = DEFAULT_MATCHER,
    networks: Networks | None = None,
) -> dict[str, float]:
    """A device's model on its own samples, each with exactly those of ``modalities`` it has.

    ``mask``: the stand-in for the others; None: the role's default. The figures are
    accuracy, loss and the macro averages over the labelled samples; recalls of every pair over the samples that have
    both, and "rsum", the mean over the pairs. A task the samples say nothing about (no label, no pair) has no figure.
    ``tasks`` and the errors as in :func:`evaluate`. ``model`` may lack the encoders of other modalities; it ends in
    evaluation mode.
    """
    asked = _tasks(model.spec, tasks)
    model.eval()
    here = tuple(m for m in modalities if dataset.has(m).any())
    alone = _alone(model, dataset, here, stage_depth, asked)
    on_device = in_torch(tables, device_of(model))
    judged = _Judged(model, dataset, here, stage_depth, alone, on_device, matcher, networks or {})
    figures: dict[str, float] = {}
    if "classification" in asked and here and dataset.labels is not None:
        figures |= _as_they_are(judged, dataset.labels, mask or default("missing"))
    if "retrieval" in asked:
        found = [_pair(judged, a, b)[0] for a, b in pairs(here)]
        sums = [pair.pop("rsum") for pair in found if "rsum" in pair]
        for pair in found:
            figures |= pair
        if sums:
            figures["rsum"] = float(np.mean(sums))
    return figures


def _tasks(model: ModelSpec, tasks: frozenset[str] | None) -> frozenset[str]:
    if tasks is None:
        return frozenset({"classification" if model.classes else "retrieval"})
    if tasks - TASKS:
        raise ModelError(
            f"unknown task {', '.join(sorted(tasks - TASKS))}", remedy=f"Choose from: {', '.join(sorted(TASKS))}."
        )
    if "classification" in tasks and not model.classes:
        raise ModelError("a model without classes can not be judged by classification", remedy="Judge it by retrieval.")
    return tasks


def _alone(
    model: StagedModel, data: Dataset, names: Sequence[str], depth: int, asked: frozenset[str]
) -> dict[str, np.ndarray]:
    """Projections of each modality by itself: a query must not have seen what it looks for."""
    needed = "retrieval" in asked or not encodes_together(model.spec)
    return {m: embeddings(model, m, data, depth) for m in names} if needed else {}


def _classification(judged: _Judged) -> list[EvaluationRow]:
    data, labels = judged.data, judged.data.labels
    if labels is None:
        raise DataError("the test set has no labels", remedy="Add an array 'label', or train with objective: clip.")
    rows = []
    spec, tables = judged.model.spec, judged.tables
    offered = {name: one for name, one in methods("missing").items() if one.offered and one.offered(spec, tables)}
    of_tables = {name for name, one in offered.items() if one.tables}
    conditions = _conditions(judged.names, len(spec.encoders), list(offered))
    for available, mask in conditions:
        has = np.flatnonzero(np.logical_and.reduce([data.has(m) for m in available]) & (labels >= 0))
        if not has.size:
            continue
        figures = _scores(judged.logits(available, has, mask), labels[has])
        if (available, mask) != conditions[0]:
            del figures["loss"]  # of a guess at what is absent it says little; one curve is enough
        rows += _rows(available, mask, figures, has.size, judged.matcher.metric if mask in of_tables else "")
    return rows


def _conditions(names: tuple[str, ...], wanted: int, masks: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """(modalities given, mask for the others): all there are, each alone and, of three or more, each pair."""
    if not names:
        return []
    whole = [(names, mask) for mask in (["none"] if len(names) == wanted else masks)]
    fewer: list[tuple[str, ...]] = [(m,) for m in names if len(names) > 1]
    fewer += pairs(names) if len(names) > 2 else []
    return whole + [(available, mask) for available in fewer for mask in masks]


def _as_they_are(judged: _Judged, labels: np.ndarray, mask: str) -> dict[str, float]:
    """Classification of the labelled samples, each by the modalities it has; {} when there is none."""
    names = judged.names
    has = np.stack([judged.data.has(m) for m in names], axis=1)  # [N, M]
    usable = has.any(axis=1) & (labels >= 0)
    if not usable.any():
        return {}
    logits = np.zeros((len(labels), judged.model.spec.classes), np.float32)
    for pattern in np.unique(has[usable], axis=0):  # samples that have the same are filled in together
        rows = np.flatnonzero(usable & (has == pattern).all(axis=1))
        logits[rows] = judged.logits([m for m, there in zip(names, pattern, strict=True) if there], rows, mask)
    return _scores(logits[usable], labels[usable])


def _scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """accuracy, loss, then the macro averages."""
    figures = classification(logits.argmax(1), labels)
    loss = float(F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels)))
    return {"accuracy": figures.pop("accuracy"), "loss": loss, **figures}


def _retrieval(judged: _Judged) -> list[EvaluationRow]:
    """Recalls of every pair of modalities, both ways, among the samples that have both."""
    rows = []
    for a, b in pairs(judged.names):
        figures, samples = _pair(judged, a, b)
        rows += _rows((a, b), "none", figures, samples)
    return rows


def _pair(judged: _Judged, a: str, b: str) -> tuple[dict[str, float], int]:
    """The recalls of one pair, {} when no sample has both; and how many have."""
    both = np.flatnonzero(judged.data.has(a) & judged.data.has(b))
    if not both.size:
        return {}, 0
    items = [same_items(arrays.chosen(judged.data.modalities[m], both)) for m in (a, b)]
    return retrieval(a, b, judged.alone[a][both], judged.alone[b][both], items), both.size


def _rows(
    available: tuple[str, ...], mask: str, figures: Mapping[str, float], samples: int, matcher: str = ""
) -> list[EvaluationRow]:
    return [EvaluationRow(0, 0, available, mask, name, value, int(samples), matcher) for name, value in figures.items()]


def personal_evaluation(
    job: Job,
    model: StagedModel,
    holdout: Dataset,
    parts: Mapping[str, Tensors],
    kept: Mapping[str, Tensors],
    statistics: Callable[[], None],
) -> dict[str, float]:
    """Metrics of the personal model: that of the device's last round with the layer it was sent for its poverty layer.

    (MMiC.) ``statistics``: takes batch norm's of ``model`` where the job asks for it. ``model`` holds afterwards what
    it held before. Without such a model: no metrics.
    """
    own = [part for part in job.stage.trained if part in kept]
    repair = chosen("repair", job.slots.repair)[0].method
    if not repair.personal or not len(holdout) or len(own) < len(job.stage.trained):
        return {}
    better: dict[str, dict[str, np.ndarray]] = {}
    for key, value in parts.get(repair.part, {}).items():
        part, _, name = key.partition("|")
        better.setdefault(part, {})[name] = value
    before = {part: part_tensors(model, part) for part in own}
    for part in own:
        load_part(model, part, {**kept[part], **better.get(part, {})})
    statistics()
    found = local_evaluation(job, model, holdout, parts, "personal")
    for part, tensors in before.items():
        load_part(model, part, tensors)
    return found


def local_evaluation(
    job: Job, model: StagedModel, holdout: Dataset, parts: Mapping[str, Tensors], prefix: str
) -> dict[str, float]:
    """Metrics "<prefix>_<name>" on the samples ``holdout``; without samples none.

    "<prefix>_score" is what returns are made of: accuracy, or where nothing is labelled the mean recall at 1. Absent
    modalities are filled in as the recipe trains them; zeros where that takes prototypes and there are none yet, and in
    place of noise. ``model`` ends in evaluation mode.
    """
    if not len(holdout):
        return {}
    labelled = bool(job.model.classes) and holdout.labels is not None and bool((holdout.labels >= 0).any())
    tasks = frozenset(
        name for name, there in (("classification", labelled), ("retrieval", needs_pairs(job.slots))) if there
    )
    tables = from_tensors(parts[PROTOTYPES]) if PROTOTYPES in parts else {}
    own = [m for m in job.model.encoders if f"head/{m}" in job.stage.present]
    matcher = matcher_of(job.slots, {})
    mask = at_inference(job.slots.missing, job.model, tables)
    kind = "+".join(("evaluation", *sorted(tasks))).encode() + kind_of_step(job, with_tables=bool(tables))
    rows = {m: int(holdout.has(m).sum()) for m in own}
    complete = int(np.logical_and.reduce([holdout.has(m) for m in own]).sum())
    known = int((holdout.labels >= 0).sum()) if labelled and holdout.labels is not None else 0
    found = counted(
        kind,
        (("", len(holdout)), ("&", complete), ("labelled", known), *sorted(rows.items())),
        lambda: judge(model, holdout, job.stage.depth, tables, tasks, own, mask=mask, matcher=matcher),
        linear="nothing" if tables else linear_in(job),  # matching costs by pairs of modalities
    )
    recalls = [value for name, value in found.items() if name.endswith("_recall_at_1")]
    score = found.get("accuracy", float(np.mean(recalls)) if recalls else None)
    metrics = {f"{prefix}_{name}": value for name, value in found.items()}
    return metrics | ({f"{prefix}_score": score} if score is not None else {})


#: Probes where there are no classes to choose by.
UNLABELLED = 16


def probe_rows(data: Dataset, model: ModelSpec) -> np.ndarray:
    """Indices of the probes. Raises DataError with fewer than two, for which no likeness is defined."""
    complete = np.logical_and.reduce([data.has(m) for m in model.encoders])
    if data.labels is None or not model.classes:
        rows = np.flatnonzero(complete)[:UNLABELLED]
    else:
        labels = np.where(complete, data.labels, -1)
        found = [np.flatnonzero(labels == c)[:1] for c in range(model.classes)]
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
    if len(rows) < 2:
        raise DataError(
            f"the test set has {len(rows)} complete samples to compare models with, at least 2 are needed",
            remedy="Add complete samples of several classes, or set weight: samples.",
        )
    return rows


def represent(model: ModelSpec, stage: Stage, parts: Mapping[str, Tensors], probes: Dataset) -> np.ndarray:
    """[m, d]: the joint representation of each probe; without a fusion the projections side by side."""
    built = build(model, stage.present)
    for name in stage.present:
        load_part(built, name, parts[name])
    built.eval()
    with torch.no_grad():
        inputs = {m: torch.from_numpy(probes.modalities[m]) for m in model.encoders}
        whole = dict.fromkeys(inputs)
        states = built.encode_batch_tokens(inputs, whole, len(probes), stage.depth)
        projections = {m: built.project(m, built.pool_tokens(m, state)) for m, state in states.items()}
        if not model.classes:
            return np.asarray(torch.cat(list(projections.values()), dim=1).numpy())
        return np.asarray(built.fuse(projections, None, states, whole).numpy())


def tasks_of(model: ModelSpec, slots: Slots, test: Dataset) -> frozenset[str]:
    """Classification where the model has classes, retrieval where pairs are learned and the test set has some.

    Only of what the devices send: a classifier that stays at home is untrained here, and alone nothing is learned here
    at all. What each device's own model is worth, it says itself (``edgefl.training.evaluate``).
    """
    paired = sum(bool(test.has(m).any()) for m in model.encoders) > 1
    classification = bool(model.classes) and slots.exchange == "all"
    retrieval = needs_pairs(slots) and paired and slots.exchange != "nothing"
    return frozenset(name for name, wanted in (("classification", classification), ("retrieval", retrieval)) if wanted)
