"""The prototype mask written from its equations in numpy, sample by sample in f64: the torch code's oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from edgefl.prototypes import mask
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher
from edgefl.prototypes.table import ClassMeans

Networks = mask.Networks


def in_torch(
    r: Mapping[str, np.ndarray],
    absent: str,
    tables: Mapping[str, ClassMeans],
    matcher: Matcher = DEFAULT_MATCHER,
    networks: Networks | None = None,
    has: Mapping[str, Sequence[bool]] | None = None,
) -> mask.Mixture:
    """The torch code on arrays: stand-ins, rows and weights. At least one modality of ``r`` can tell."""
    shown = {m: torch.tensor(rows) for m, rows in (has or {}).items()}
    projections = {m: torch.from_numpy(np.asarray(h, np.float32)) for m, h in r.items()}
    found = mask.stand_in(absent, projections, shown, mask.in_torch(tables), matcher, networks or {})
    assert found is not None
    return found


def _cosine(r: np.ndarray, row: np.ndarray) -> float:
    length = np.linalg.norm(r) * np.linalg.norm(row)
    return float(r @ row / length) if length else 0.0


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "cosine": _cosine,
    "l1": lambda r, row: -float(np.abs(r - row).sum()),
    "l2": lambda r, row: -float(np.sqrt(((r - row) ** 2).sum())),
}


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def scores(
    m: str, r: np.ndarray, absent: str, tables: Mapping[str, ClassMeans], matcher: Matcher, networks: Networks
) -> dict[int, float]:
    """Row of the absent modality's table -> its score by one sample's projection ``r`` [d] of the modality ``m``."""
    rows, there = tables[absent].means.astype(np.float64), np.flatnonzero(tables[absent].present)
    if matcher.metric in METRICS:
        own = tables[m]
        return {c: METRICS[matcher.metric](r, own.means[c].astype(np.float64)) for c in there if own.present[c]}
    total, found = sum(weight for weight, _ in networks[m]), dict.fromkeys(there.tolist(), 0.0)
    for weight, network in networks[m]:
        with torch.no_grad():
            said = network(torch.from_numpy(r[None].astype(np.float32)), absent)[0].double().numpy()
        by_row = dict(enumerate(softmax(said))) if matcher.metric == "classifier" else None
        found = {c: found[c] for c in found if by_row is None or c in by_row}
        for c in found:
            found[c] += weight / total * (_cosine(said, rows[c]) if by_row is None else by_row[c])
    return found


def match(
    shown: Mapping[str, np.ndarray],
    absent: str,
    tables: Mapping[str, ClassMeans],
    matcher: Matcher = DEFAULT_MATCHER,
    networks: Networks | None = None,
) -> dict[int, float]:
    """The best rows of one sample, by its projections ``shown`` ([d] each), and their weights; {}: none may match."""
    networks = networks or {}
    heard = [m for m in shown if (networks.get(m) if matcher.trained else m in tables)]
    each = [scores(m, shown[m].astype(np.float64), absent, tables, matcher, networks) for m in heard]
    mean = {c: float(np.mean([one[c] for one in each if c in one])) for c in sorted(set().union(*each))}
    if matcher.metric == "classifier":
        mean = {c: float(np.log(max(p, np.finfo(np.float32).tiny))) for c, p in mean.items()}
    best = sorted(mean, key=lambda c: -mean[c])[: matcher.k]
    weights = softmax(np.array([mean[c] for c in best]) / matcher.temperature) if best else []
    return dict(zip(best, weights, strict=True))


def stand_in(
    r: Mapping[str, np.ndarray],
    absent: str,
    tables: Mapping[str, ClassMeans],
    matcher: Matcher = DEFAULT_MATCHER,
    networks: Networks | None = None,
) -> np.ndarray:
    """Stand-ins [B, d] of the modality ``absent`` from the projections ``r`` [B, d] of the others."""
    size = len(next(iter(r.values())))
    made = np.zeros((size, tables[absent].means.shape[1]))
    for i in range(size):
        for c, weight in match({m: h[i] for m, h in r.items()}, absent, tables, matcher, networks).items():
            made[i] += weight * tables[absent].means[c]
    return made.astype(np.float32)


def filled(
    r: Mapping[str, np.ndarray],
    wanted: Sequence[str],
    tables: Mapping[str, ClassMeans],
    matcher: Matcher = DEFAULT_MATCHER,
    networks: Networks | None = None,
) -> dict[str, np.ndarray]:
    """The projections ``r`` of one or more modalities with every other of ``wanted``; zeros without a table."""
    zeros = np.zeros_like(next(iter(r.values())))
    made = {m: stand_in(r, m, tables, matcher, networks) if m in tables else zeros for m in wanted if m not in r}
    return {**r, **made}
