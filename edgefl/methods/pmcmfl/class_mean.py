"""Class means (PmcmFL, arXiv 2312.13508, equations 1-3): prototypes of each modality and of the fused representation.

P_m,c: mean projection r_m [d] of class c over the samples that have modality m, or with ``from: pairs`` over the
complete ones: the paper defines its representations for pairs (section 3.2), and a multiway encoder makes something
else of a modality alone. "fused": mean fused representation over the complete samples. Merged by counts, class by
class. A class without samples has count 0: absent, not zero (D-P2, D-P7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edgefl.aggregation.mean import Load, Outcome
from edgefl.aggregation.prototype_merge import averaged
from edgefl.errors import Problem
from edgefl.lazy import torch
from edgefl.models.spec import EncoderSpec, ModelSpec, fused_width, fuses_tokens
from edgefl.plan.job import Candidate, Job
from edgefl.prototypes.mask import TRAINED_METRICS
from edgefl.prototypes.table import FUSED, ClassMeans, Weighting
from edgefl.registry import MIN_COUNT, Option, Recipe, Rule, register
from edgefl.roles import Prototypes

if TYPE_CHECKING:
    from edgefl.data.dataset import Dataset
    from edgefl.models.encoder import TokenState
    from edgefl.models.staged import StagedModel
    from edgefl.training.forward import Auxiliary

#: (table, dataset rows [n], values [n, d]) of one batch.
Represented = list[tuple[str, np.ndarray, np.ndarray]]


def local(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator, **options: object
) -> Mapping[str, ClassMeans]:
    """Class means of a device's samples, after local training. ``model`` ends in evaluation mode."""
    from edgefl.training.flop_cache import counted, kind_of_step, linear_in  # loads torch

    model.eval()
    modalities = [m for m in job.model.encoders if f"head/{m}" in model.parts_present and dataset.has(m).any()]
    widths = dict.fromkeys(modalities, job.model.head.out)
    if set(modalities) == set(job.model.encoders):
        widths[FUSED] = fused_width(job.model)
    sums = {m: np.zeros((job.model.classes, width)) for m, width in widths.items()}
    counts = {m: np.zeros(job.model.classes, np.float32) for m in widths}
    labels = dataset.labels if dataset.labels is not None else np.full(len(dataset), -1)
    telling = labels >= 0
    if options["from"] == "pairs":
        telling &= np.logical_and.reduce([dataset.has(m) for m in job.model.encoders])
    labelled = np.flatnonzero(telling)
    size = job.hyper.micro_batch or job.hyper.batch_size
    kind = FUSED.encode() + kind_of_step(job, with_tables=False)
    for start in range(0, len(labelled), size):
        indices = labelled[start : start + size]
        has = {m: dataset.has(m)[indices] for m in modalities}
        complete = np.logical_and.reduce(list(has.values()))  # which alone are fused
        shape = (*((m, int(rows.sum())) for m, rows in has.items()), (FUSED, int(complete.sum())))
        work = partial(_representations, model, job, dataset, indices, modalities)
        for name, rows, values in counted(kind, shape, work, linear=linear_in(job)):
            np.add.at(sums[name], labels[rows], values)
            np.add.at(counts[name], labels[rows], 1)
    return {m: ClassMeans((sums[m] / np.maximum(counts[m], 1)[:, None]).astype(np.float32), counts[m]) for m in sums}


def _representations(
    model: StagedModel, job: Job, dataset: Dataset, indices: np.ndarray, modalities: list[str]
) -> Represented:
    from edgefl.training.batches import make_batch  # loads torch
    from edgefl.training.embeddings import device_of, to_numpy

    with torch.no_grad():
        batch = make_batch(dataset, indices, modalities, device_of(model))
        states: dict[str, TokenState] = {}
        if fuses_tokens(job.model):
            states = model.encode_batch_tokens(batch.inputs, batch.rows, batch.size, job.stage.depth)
            pooled = {m: model.pool_tokens(m, state) for m, state in states.items()}
        else:
            pooled = model.encode_batch(batch.inputs, batch.rows, batch.size, job.stage.depth)
        projected = {m: model.project(m, h) for m, h in pooled.items()}
        has = {m: dataset.has(m)[indices] for m in projected}
        result = [(m, indices[has[m]], to_numpy(r)) for m, r in projected.items()]
        complete = np.logical_and.reduce(list(has.values()))
        if len(projected) == len(job.model.encoders) and complete.any():
            kept = {m: torch.from_numpy(np.flatnonzero(complete[has[m]])).to(r.device) for m, r in projected.items()}
            chosen = {m: r[kept[m]] for m, r in projected.items()}
            tokens = {m: state.of(kept[m]) for m, state in states.items()}
            fused = model.fuse(chosen, None, tokens or None, dict.fromkeys(kept))
            result.append((FUSED, indices[complete], to_numpy(fused)))
    return result


def rows(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """A table a modality, and the fused one."""
    return _tables(model, list(model.encoders))


def local_rows(job: Job, candidate: Candidate, own: Sequence[str], **options: object) -> dict[str, tuple[int, int]]:
    """Tables of the device's modalities; none without labels or, of pairs, without all modalities."""
    unlabelled = bool(candidate.class_counts) and not any(candidate.class_counts)
    if unlabelled or (options["from"] == "pairs" and len(own) < len(job.model.encoders)):
        return {}
    return _tables(job.model, own)


def _tables(model: ModelSpec, modalities: Sequence[str]) -> dict[str, tuple[int, int]]:
    fused = {FUSED: fused_width(model)} if len(modalities) == len(model.encoders) else {}
    return {m: (model.classes, width) for m, width in {**dict.fromkeys(modalities, model.head.out), **fused}.items()}


def merge(
    loaders: Mapping[str, Load], previous: Load | None, rng: np.random.Generator, *, weighting: Weighting
) -> Outcome:
    """The devices' tables, averaged class by class."""
    return averaged(loaders, previous, weighting)


def start(model: ModelSpec, rng: np.random.Generator, **options: object) -> Mapping[str, ClassMeans]:
    """Standard normal prototypes of each modality, of none fused; {} for a start of zeros."""
    if options["start"] != "gaussian":
        return {}
    shapes = rows(model)
    drawn = {m: rng.standard_normal(shapes[m], np.float32) for m in model.encoders}
    return {m: ClassMeans(each, np.ones(len(each), np.float32)) for m, each in drawn.items()}


def shape(encoders: Mapping[str, EncoderSpec], *, match: str) -> dict[str, object]:
    """Small networks of the model that find a sample's classes."""
    return {"matching": match if match in {"classifier", "prior"} else "none"}


def candidates(*, k: float) -> tuple[int, ...]:
    """The k that are compared: every small one, since few classes are alike, then ever further apart."""
    return () if int(k) else (1, 2, 3, 5, 10, 20, 50, 100)


def _uncounted(recipe: Recipe) -> list[Problem]:
    """Problem of a k chosen for a match whose networks are trained after the last hold-out has been judged."""
    options = recipe["prototypes"]["class_mean"] or {}
    match = options.get("match")
    if match not in TRAINED_METRICS or not candidates(k=float(options.get("k", 1))):
        return []
    text = (
        f"k: 0 is chosen in rounds that judge a hold-out, and the networks of match: {match} are trained in the "
        "closing round, after the last of these; set a k, or match: cosine, l1 or l2"
    )
    return [Problem("prototypes", text)]


_NO_LABELS = (
    "class_mean needs labels, which no term of the objective uses; add the term cross_entropy, or set prototypes: none"
)
register(
    Prototypes("none", "none", default=True),
    Prototypes(
        "class_mean",
        "class means of each modality and of the fused representation (arXiv 2312.13508, eqs 1-3)",
        {
            "weighting": Option(
                "modality",
                "weights of the merge: each device's samples of the modality, or of the class",
                ("modality", "class"),
            ),
            "from": Option(
                "all",
                "samples of a modality's prototypes: all that have it, or pairs: those that have every modality",
                ("all", "pairs"),
            ),
            "start": Option(
                "zeros",
                "stand-ins before the first prototypes: zeros, or standard normal ones, the same on every device",
                ("zeros", "gaussian"),
            ),
            "match": Option(
                "cosine",
                "how a sample finds its classes at inference: nearest prototype, a small classifier, or a small "
                "network into the other modality's space; the small ones are trained in a closing round by all devices",
                ("cosine", "l1", "l2", "classifier", "prior"),
            ),
            "combine": Option(
                "average",
                "how the devices' small networks become one: their mean, the largest device's, or all of them",
                ("average", "largest", "ensemble"),
            ),
            "min_count": MIN_COUNT,
            "k": Option(
                3,
                "classes mixed at inference; 0: as many as make the received model right most often on the devices' "
                "hold-outs, 3 before the first prototypes",
                least=0,
            ),
            "temperature": Option(
                0.0,
                "of the softmax that weighs them; 0: the match's own, which is 0.01 for cosine and 1 for the others: "
                "the plain softmax of -distances and of a prior's cosines, and a classifier's probabilities themselves",
                least=0,
            ),
        },
        rules=(Rule("objective", "labels", _NO_LABELS),),
        conflicts=_uncounted,
        local=local,
        merge=merge,
        start=start,
        shape=shape,
        rows=rows,
        local_rows=local_rows,
        candidates=candidates,
    ),
)
