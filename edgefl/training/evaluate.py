"""Evaluation: the global model on the test set, under every condition; a device's own model on its hold-out.

Conditions: all modalities, each alone and, with three or more, each pair; absent modalities are filled in by each mask:
zeros; with prototypes, mixtures of those of the classes that match, and as an upper bound those of the true classes
(``ORACLE``: PmcmFL, arXiv 2312.13508); with parts ``reconstruct/<m>``, reconstructions.

What the zero mask shows of a recipe that completes its data (FedMVP): a generator completed the training samples of the
devices, and there is none here, so that the figure is that of a sample whose other modality could not be made. Joint
fusion is shown the tokens at hand and, for the rest, the one token of an absent modality, as training shows it the
samples it could not complete; a device that could complete all of them has not trained that token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch import Tensor

from edgefl.data import arrays
from edgefl.data.dataset import Dataset
from edgefl.data.levels import expected_value, levels_in, ranked_probability_score, target_errors
from edgefl.data.sources import load
from edgefl.errors import DataError, ModelError
from edgefl.label_spaces import spaces_in
from edgefl.models.encoder import TokenState
from edgefl.models.heads import among_own
from edgefl.models.parts import loaded
from edgefl.models.spec import PROTOTYPES, ModelSpec, encodes_together
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Slots, Stage
from edgefl.plan.training_samples import needs_pairs
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher, Networks, Table, in_torch
from edgefl.prototypes.table import ClassMeans, from_tensors
from edgefl.records import ORACLE, EvaluationRow
from edgefl.registry import Slot, default, methods
from edgefl.training.batches import input_of
from edgefl.training.embeddings import BATCH, device_of, embeddings, take_statistics, to_numpy
from edgefl.training.fill import BY_LABEL, AtHand, Make, fill, inferred
from edgefl.training.metrics import classification, pairs, ranking, retrieval, same_items, several_labels

#: What a model can be judged by: labels, and pairs of modalities.
TASKS = frozenset({"classification", "retrieval"})
Tensors = Mapping[str, np.ndarray]
#: Probes where there are no classes to choose by.
UNLABELLED = 16


def load_test_set(path: str, model: ModelSpec) -> Dataset:
    """The coordinator's own labelled (or paired) samples (.npz or a folder with manifest.jsonl). Raises DataError."""
    data = load(Path(path), modalities=dict(model.encoders), label_names=model.label_names)
    if len(data) == 0:
        raise DataError(f"{path} holds no test samples")
    return data


@dataclass(frozen=True)
class Criteria:
    """How a model is evaluated. ``tasks``: None means classification for a model with classes, else retrieval.

    ``prototypes``: also with the prototype mask, matched by ``matcher`` (``networks``: those a trained one needs).
    ``mask``: the stand-in a device's own judgement uses; None: the role's default. ``statistics``: those of batch norm
    are first taken on the inputs of the test set. ``candidates``: values of the matcher's k that a device's own
    judgement compares. ``missing``: the recipe's slot, for the options of its stand-in. ``together``: samples encoded
    at once.
    """

    tasks: frozenset[str] | None = None
    prototypes: bool = False
    mask: str | None = None
    matcher: Matcher = DEFAULT_MATCHER
    networks: Networks = field(default_factory=dict)
    statistics: bool = False
    candidates: tuple[int, ...] = ()
    missing: Slot = field(default_factory=dict)
    together: int = BATCH

    def of(self, model: ModelSpec) -> frozenset[str]:
        """Tasks to evaluate a model by: ``tasks``, or the model's default.

        Raises ModelError for an unknown task, or for classification by a model without classes.
        """
        if self.tasks is None:
            return frozenset({"classification" if model.classes else "retrieval"})
        if unknown := self.tasks - TASKS:
            choices = ", ".join(sorted(TASKS))
            raise ModelError(f"unknown task {', '.join(sorted(unknown))}", remedy=f"Choose from: {choices}.")
        if "classification" in self.tasks and not model.classes:
            raise ModelError(
                "a model without classes cannot be judged by classification", remedy="Judge it by retrieval."
            )
        return self.tasks


@dataclass(frozen=True)
class _Judged:
    """A model, the samples, the modalities at hand (``names``), and the tables that stand-ins are made of.

    ``alone[m]``: projections [N, d] of m encoded by itself, since a query must not have seen what it looks for; zeros
    in rows that lack m; empty where neither retrieval nor classification reads them.
    """

    model: StagedModel
    data: Dataset
    names: tuple[str, ...]
    depth: int
    alone: Mapping[str, np.ndarray]
    tables: Mapping[str, Table]
    criteria: Criteria

    def logits(self, available: Sequence[str], rows: np.ndarray, mask: str, oracle: bool = False) -> np.ndarray:
        """[n, C] of the samples ``rows``, which all have ``available``, given only these; the rest by ``mask``.

        ``oracle``: the mask knows the labels.
        """
        together = self.criteria.together
        parts = [rows[start : start + together] for start in range(0, len(rows), together)]
        with torch.no_grad():
            return np.concatenate([self._batch(available, part, mask, oracle) for part in parts])

    def _batch(self, available: Sequence[str], rows: np.ndarray, mask: str, oracle: bool) -> np.ndarray:
        model, states, device = self.model, None, device_of(self.model)
        if encodes_together(model.spec):  # with what else a row is given
            inputs = {m: input_of(self.data, m, rows, device) for m in available}
            states = model.encode_batch_tokens(inputs, dict.fromkeys(inputs), len(rows), self.depth)
            r = {m: model.project(m, model.pool_tokens(m, state)) for m, state in states.items()}
        else:
            r = {m: torch.from_numpy(self.alone[m][rows]).to(device) for m in available}
        name = mask if len(available) < len(model.spec.encoders) else default("missing")
        make, options = inferred(name, self.criteria.missing)
        told = None
        if oracle and self.data.labels is not None:
            told, options = torch.from_numpy(self.data.labels[rows]).to(device), {**options, **BY_LABEL}
        given = AtHand(r, {}, model, self.tables, told, options, self.criteria.matcher, self.criteria.networks)
        return to_numpy(logits_of(given, make, states))

    def pair(self, a: str, b: str) -> tuple[dict[str, float], int]:
        """The recalls of one pair, {} when no sample has both; and how many have."""
        both = np.flatnonzero(self.data.has(a) & self.data.has(b))
        if not both.size:
            return {}, 0
        items = [same_items(arrays.chosen(self.data.modalities[m], both)) for m in (a, b)]
        return retrieval(a, b, self.alone[a][both], self.alone[b][both], items), both.size


def logits_of(given: AtHand, make: Make, tokens: Mapping[str, TokenState] | None = None) -> Tensor:
    """Class logits [B, C] with missing modalities filled in.

    ``given``: projections of a batch, the same modalities in every row; ``make``: makes stand-ins for the others;
    ``tokens``: encoder tokens, for joint fusion only.
    """
    filled = fill(make, given)
    has = {m: given.rows(True) for m in given.full}
    return given.model.classify(given.model.fuse(filled.values, has, tokens, counted=filled.counted))


def evaluate(
    model: ModelSpec, stage: Stage, parts: Mapping[str, Tensors], test: Dataset, criteria: Criteria
) -> list[EvaluationRow]:
    """Rows of the model made of ``parts``: classification under every condition, then retrieval of every pair, both
    ways, among the samples that have both.

    A model with parts that reconstruct is also shown with what they make. Raises DataError for classification without
    labels, ModelError for a task the model was not made for.
    """
    tasks = criteria.of(model)
    built = loaded(model, stage.present, parts)
    if criteria.statistics:
        take_statistics(built, test, stage.depth)
    tables = from_tensors(parts[PROTOTYPES]) if criteria.prototypes and PROTOTYPES in parts else {}
    judged = _judged(built, test, stage.depth, tables, tuple(model.encoders), criteria)
    rows = _classification(judged) if "classification" in tasks else []
    for a, b in pairs(judged.names) if "retrieval" in tasks else ():
        rows += _rows((a, b), "none", *judged.pair(a, b))
    return rows


def judge(
    model: StagedModel,
    dataset: Dataset,
    depth: int,
    tables: Mapping[str, ClassMeans],
    modalities: Sequence[str],
    criteria: Criteria,
) -> dict[str, float]:
    """A device's model on its own samples, each with exactly those of ``modalities`` it has.

    The figures are accuracy, loss and the macro averages over the labelled samples; recalls of every pair over the
    samples that have both, and "rsum", the mean over the pairs. A task the samples say nothing about (no label, no
    pair) has no figure. With ``criteria.candidates`` and ``tables`` also the right answers by each k of the prototype
    mask, every modality alone. Errors as in :func:`evaluate`. ``model`` may lack the encoders of other modalities; it
    ends in evaluation mode.
    """
    tasks = criteria.of(model.spec)
    model.eval()
    judged = _judged(model, dataset, depth, tables, modalities, criteria)
    figures: dict[str, float] = {}
    if "classification" in tasks and judged.names and dataset.labels is not None:
        figures |= _as_they_are(judged, dataset.labels, criteria.mask or default("missing"))
        figures |= _right_by_k(judged, dataset.labels) if tables else {}
    if "retrieval" in tasks:
        found = [judged.pair(a, b)[0] for a, b in pairs(judged.names)]
        sums = [pair.pop("rsum") for pair in found if "rsum" in pair]
        for pair in found:
            figures |= pair
        if sums:
            figures["rsum"] = float(np.mean(sums))
    return figures


def _judged(
    model: StagedModel,
    data: Dataset,
    depth: int,
    tables: Mapping[str, ClassMeans],
    modalities: Sequence[str],
    criteria: Criteria,
) -> _Judged:
    names = tuple(m for m in modalities if data.has(m).any())
    needed = "retrieval" in criteria.of(model.spec) or not encodes_together(model.spec)
    alone = {m: embeddings(model, m, data, depth, together=criteria.together) for m in names} if needed else {}
    return _Judged(model, data, names, depth, alone, in_torch(tables, device_of(model)), criteria)


def _classification(judged: _Judged) -> list[EvaluationRow]:
    data, labels = judged.data, judged.data.labels
    if labels is None:
        raise DataError("the test set has no labels", remedy="Add an array 'label', or train with objective: clip.")
    rows = []
    spec, tables = judged.model.spec, judged.tables
    offered = {name: one for name, one in methods("missing").items() if one.offers(spec, tables)}
    of_tables = [name for name, one in offered.items() if one.tables]
    conditions = _conditions(judged.names, len(spec.encoders), [*offered, *([ORACLE] if of_tables else [])])
    for available, mask in conditions:
        has = np.flatnonzero(np.logical_and.reduce([data.has(m) for m in available]) & (labels >= 0))
        if not has.size:
            continue
        told = mask == ORACLE
        logits = judged.logits(available, has, of_tables[0] if told else mask, told)
        figures = _scores(logits, data, has)
        if data.targets is None and data.sets is None and len(spaces_in(data.label_names)) < 2:
            figures |= ranking(torch.from_numpy(logits).double().log_softmax(1).numpy(), labels[has])
        if (available, mask) != conditions[0]:
            del figures["loss"]  # of a guess at what is absent it says little; one curve is enough
        rows += _rows(available, mask, figures, has.size, judged.criteria.matcher.metric if mask in of_tables else "")
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
    # Samples that have the same are filled in together. A plain np.unique imports numpy.ma: 10 MiB.
    for pattern in sorted(set(map(tuple, has[usable].tolist()))):
        rows = np.flatnonzero(usable & (has == pattern).all(axis=1))
        logits[rows] = judged.logits([m for m, there in zip(names, pattern, strict=True) if there], rows, mask)
    return _scores(logits[usable], judged.data, np.flatnonzero(usable))


def _right_by_k(judged: _Judged, labels: np.ndarray) -> dict[str, float]:
    """Right answers by each candidate k, and of how many: the labelled samples of each modality, given alone."""
    rows = {m: np.flatnonzero(judged.data.has(m) & (labels >= 0)) for m in judged.names}
    total = sum(map(len, rows.values()))
    if not judged.criteria.candidates or not total:
        return {}
    mask = next(name for name, one in methods("missing").items() if one.tables)
    figures = {"judged_with_k": float(total)}
    for k in judged.criteria.candidates:
        matcher = replace(judged.criteria.matcher, k=k)
        mixed = replace(judged, criteria=replace(judged.criteria, matcher=matcher))
        right = [mixed.logits((m,), own, mask).argmax(1) == labels[own] for m, own in rows.items() if own.size]
        figures[f"right_with_k_{k}"] = float(np.concatenate(right).sum())
    return figures


def _scores(logits: np.ndarray, data: Dataset, rows: np.ndarray) -> dict[str, float]:
    """Figures of logits [n, C] for the labelled samples ``rows`` [n] of ``data``.

    accuracy, loss, then the macro averages; of a numeric target R², loss and the mean errors; of several labels mean
    average precision, loss and macro F1; of several label sets each sample's answer is among its own set's classes, and
    ``accuracy_<set>`` that of the samples with a label of this set.
    """
    if data.sets is not None:
        return _several(torch.from_numpy(logits), data.sets[rows])
    labels, levels = np.asarray(data.labels)[rows], levels_in(data.label_names)
    given = torch.from_numpy(logits)
    if data.targets is not None and levels is not None:
        truth = data.targets[rows]
        figures = target_errors(expected_value(given.double().softmax(1).numpy(), levels), truth)
        loss = float(ranked_probability_score(given.double(), torch.from_numpy(truth), levels))
        return {"r2": figures.pop("r2"), "loss": loss, **figures}
    truths = torch.from_numpy(labels)
    among = among_own(given, truths, data.label_names)
    loss = float(F.cross_entropy(among, truths))
    answers = among.argmax(1).numpy()
    figures = classification(answers, labels)
    right = {f"accuracy_{space}": answers[own] == labels[own] for space, own in _by_space(labels, data.label_names)}
    by_space = {name: float(one.mean()) for name, one in right.items()}
    return {"accuracy": figures.pop("accuracy"), "loss": loss, **figures, **by_space}


def _by_space(labels: np.ndarray, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Each label set that ``labels`` [n] are of, where there are several, and which are of it [n]."""
    spaces = spaces_in(names)
    for space, places in spaces.items() if len(spaces) > 1 else ():
        if (own := np.isin(labels, places)).any():
            yield space, own


def _several(logits: Tensor, sets: np.ndarray) -> dict[str, float]:
    each = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(sets).float(), reduction="none")
    return {**several_labels(logits.double().sigmoid().numpy(), sets), "loss": float(each.sum(dim=1).mean())}


def _rows(
    available: tuple[str, ...], mask: str, figures: Mapping[str, float], samples: int, matcher: str = ""
) -> list[EvaluationRow]:
    return [EvaluationRow(0, 0, available, mask, name, value, int(samples), matcher) for name, value in figures.items()]


def probe_rows(data: Dataset, model: ModelSpec) -> np.ndarray:
    """Test-set indices of the probe samples for CKA weights (FedMVP).

    The first complete sample of each class; without labels the first ``UNLABELLED`` complete ones. The caller leaves
    them out of the test. Raises DataError for fewer than two.
    """
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
    built = loaded(model, stage.present, parts)
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
