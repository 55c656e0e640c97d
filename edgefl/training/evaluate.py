"""The global model on the test set: with everything, and with each modality alone under each mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it

from edgefl.data.dataset import Dataset
from edgefl.data.load import load
from edgefl.errors import DataError
from edgefl.models.build import StagedModel, build
from edgefl.models.spec import ModelSpec
from edgefl.models.state import load_part
from edgefl.plan.values import Stage
from edgefl.prototypes.library import ClassMeans, from_tensors
from edgefl.prototypes.mask import masked
from edgefl.records import EvaluationRow

#: Test samples encoded at once: small enough for a server's worker beside everything else.
BATCH = 128
#: Norms below this count as this, as in ``edgefl.prototypes.matching``.
SMALLEST_NORM = 1e-12
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


def evaluate(
    model: ModelSpec, stage: Stage, parts: Mapping[str, Tensors], test: TestSet, *, prototypes: bool
) -> list[EvaluationRow]:
    """Accuracy rows (labelled) or retrieval rows (unlabelled) of the model made of ``parts``."""
    built = build(model, stage.present)
    for name in stage.present:
        load_part(built, name, parts[name])
    built.eval()
    projections = {m: _project(built, m, test.data, stage.depth) for m in model.encoders if test.data.has(m).any()}
    if not model.classes:
        return _retrieval(model, projections, test.data)
    tables = from_tensors(parts["prototypes"]) if prototypes and "prototypes" in parts else {}
    return _accuracy(built, projections, test.data, tables)


def _project(model: StagedModel, modality: str, data: Dataset, depth: int) -> np.ndarray:
    """[N, d]: projections; rows that lack the modality hold zeros."""
    out = np.zeros((len(data), model.spec.head.out), np.float32)
    rows = np.flatnonzero(data.has(modality))
    with torch.no_grad():
        for start in range(0, len(rows), BATCH):
            index = rows[start : start + BATCH]
            x = torch.from_numpy(data.modalities[modality][index])
            out[index] = model.project(modality, model.encode(modality, x, depth)).numpy()
    return out


def _accuracy(
    model: StagedModel, projections: Mapping[str, np.ndarray], data: Dataset, tables: Mapping[str, ClassMeans]
) -> list[EvaluationRow]:
    if data.labels is None:
        raise DataError("the test set has no labels", remedy="Add an array 'label', or train with objective: clip.")
    rows = []
    conditions = _conditions(list(projections), len(model.spec.encoders), bool(tables))
    for available, mask in conditions:
        has = np.logical_and.reduce([data.has(m) for m in available]) & (data.labels >= 0)
        if not has.any():
            continue
        given = {m: projections[m][has] for m in available}
        filled = masked(given, list(model.spec.encoders), tables, mask, model.spec.head.out)
        logits = _classify(model, filled)
        correct = float((logits.argmax(1) == data.labels[has]).mean())
        rows.append(EvaluationRow(available=available, missing=mask, value=correct, samples=int(has.sum())))
        if (available, mask) == conditions[0]:
            loss = F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(data.labels[has]))
            rows.append(EvaluationRow(0, 0, available, mask, "loss", float(loss), int(has.sum())))
    return rows


def _conditions(names: list[str], wanted: int, tables: bool) -> list[tuple[tuple[str, ...], str]]:
    """(modalities given, mask for the others): all there are, then each alone."""
    masks = ("zero", "prototype") if tables else ("zero",)
    whole = [(tuple(names), mask) for mask in (("none",) if len(names) == wanted else masks)]
    return whole + [((m,), mask) for m in names for mask in masks if len(names) > 1]


def _classify(model: StagedModel, filled: Mapping[str, np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        logits = model.classify(model.fuse({m: torch.from_numpy(r) for m, r in filled.items()}))
    return np.asarray(logits.numpy())


def _retrieval(model: ModelSpec, projections: Mapping[str, np.ndarray], data: Dataset) -> list[EvaluationRow]:
    """Recall at 1, both ways, among the complete samples."""
    a, b = list(model.encoders)
    both = data.has(a) & data.has(b)
    if a not in projections or b not in projections or not both.any():
        return []
    z_a, z_b = (
        projections[m][both] / np.maximum(np.linalg.norm(projections[m][both], axis=1, keepdims=True), SMALLEST_NORM)
        for m in (a, b)
    )
    similarity = z_a @ z_b.T
    truth = np.arange(len(similarity))
    ways = ((f"{a}_to_{b}_recall_at_1", similarity), (f"{b}_to_{a}_recall_at_1", similarity.T))
    return [
        EvaluationRow(available=(a, b), metric=name, value=float((s.argmax(1) == truth).mean()), samples=len(truth))
        for name, s in ways
    ]
