"""The prototype mask (ProtoMix, arXiv 2312.13508): a mixture of prototypes stands in for an absent modality.

    s_p = mean over the modalities m at hand that have row p of s_p^m (docs/decisions/0034)
    s_p^m = cosine(r_m, P_m[p]) or -|r_m - P_m[p]|; a classifier's probability of class p, or cosine(prior(r_m), Q[p])
    of probabilities then the logarithm: at T = 1 they are the weights themselves, renormalised (docs/decisions/0031)
    best k;  w = softmax(s / T);  stand-in = sum_j w_j Q[j]

r_m [B, d]: projections; P_m [P, d]: the prototypes of m, Q those of the absent modality. One code for training,
evaluation and exported graphs: no branch depends on a value. Where no row may match, the stand-in is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgefl.errors import ModelError
from edgefl.lazy import F, torch
from edgefl.models.vectors import SMALLEST_NORM, unit
from edgefl.prototypes.table import ClassMeans

if TYPE_CHECKING:
    from torch import Tensor

#: In place of the score of a row that must not match: far below any distance between finite projections, and after the
#: division by any temperature down to 1e-8 still a number.
EXCLUDED = -1e30
#: A probability below this counts as this in logarithms: the smallest normal f32, which no runtime rounds to zero.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)

#: Classes mixed and softmax temperature over cosines, in training, evaluation and exported bundles alike. So sharp that
#: only near ties are mixed: an even mixture of classes is what zeros already say (docs/decisions/0005).
TOP_K = 3
TEMPERATURE = 0.01
#: Each metric's own temperature. The paper names none, which is 1: the softmax of -distances and of a prior's cosines
#: as they are, and a classifier's probabilities themselves (docs/decisions/0031). Cosines with a modality's own
#: prototypes at 0.05 and 0.2 serve the weaker sensor worse than at 0.01 (measured, docs/decisions/0005).
TEMPERATURES = {"cosine": TEMPERATURE, "l1": 1.0, "l2": 1.0, "classifier": 1.0, "prior": 1.0}
#: The metrics whose scores small trained networks give.
TRAINED_METRICS = ("classifier", "prior")


@dataclass(frozen=True)
class Matcher:
    """How an absent modality's class is guessed.

    ``metric``: the score of a class; ``k``: how many of the best are mixed; ``temperature`` divides the scores, or a
    classifier's logarithms, before the softmax; 0 becomes the metric's own (``TEMPERATURES``). Raises ModelError for an
    unknown metric and for settings out of range.
    """

    metric: str = "cosine"
    k: int = TOP_K
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.metric not in TEMPERATURES:
            raise ModelError(f"unknown metric {self.metric!r}", remedy=f"Choose one of: {', '.join(TEMPERATURES)}.")
        if self.k < 1 or self.temperature < 0:
            raise ModelError(f"a matcher needs k >= 1 and temperature >= 0, got {self.k} and {self.temperature}")
        if self.temperature == 0:
            object.__setattr__(self, "temperature", TEMPERATURES[self.metric])

    @property
    def trained(self) -> bool:
        """Whether small networks give the scores."""
        return self.metric in TRAINED_METRICS


DEFAULT_MATCHER = Matcher()

#: A small trained network: projections [B, d] of the modality at hand and the name of the absent one -> logits [B, C]
#: (classifier), or projections [B, d] of the absent modality (prior).
Network = Callable[["Tensor", str], "Tensor"]
#: By modality at hand: the network of each device that has one, with its weight (samples).
Networks = Mapping[str, Sequence[tuple[float, Network]]]


@dataclass(frozen=True)
class Table:
    """One modality's prototypes [P, d] and which rows hold one [P]."""

    rows: Tensor
    valid: Tensor


Tables = Mapping[str, Table]


class Scores(NamedTuple):
    """Scores [B, P] of the rows of a table (larger is nearer), and which may match ``among``: [P], or [B, P]."""

    values: Tensor
    among: Tensor


class Mixture(NamedTuple):
    """Stand-ins [B, d], the rows of the table they are mixed from [B, k] (-1: none), and the weights [B, k].

    The weights of a sample sum to one, or are all zero when no row may match.
    """

    values: Tensor
    rows: Tensor
    weights: Tensor


def in_torch(tables: Mapping[str, ClassMeans], device: str | torch.device = "cpu") -> dict[str, Table]:
    """The tables as tensors on ``device``."""
    return {
        m: Table(torch.from_numpy(table.means).to(device), torch.from_numpy(table.present).to(device))
        for m, table in tables.items()
    }


def stand_in(
    absent: str,
    r: Mapping[str, Tensor],
    has: Mapping[str, Tensor],
    tables: Tables,
    matcher: Matcher,
    networks: Networks,
) -> Mixture | None:
    """Stand-ins of the modality ``absent`` from the projections ``r`` [B, d] of the others.

    ``has``: which rows have a modality [B], without an entry: all. ``networks``: for a trained matcher, in place of the
    others' tables. None when ``absent`` has no table, or all the others lack theirs.
    Raises ModelError when a trained matcher has no network of any of the others.
    """
    if absent not in tables or not (matcher.trained or any(m in tables for m in r if m != absent)):
        return None
    rows, weights = choose(scores_of(absent, r, has, tables, matcher, networks), matcher, len(tables[absent].rows))
    return Mixture(mix(rows, weights, tables[absent]), rows, weights)


def scores_of(
    absent: str,
    r: Mapping[str, Tensor],
    has: Mapping[str, Tensor],
    tables: Tables,
    matcher: Matcher,
    networks: Networks,
) -> Scores:
    """How near each row of the absent modality's table is, by all modalities at hand; arguments as ``stand_in``."""
    others = [m for m in r if m != absent]
    usable = [m for m in others if (networks.get(m) if matcher.trained else m in tables)]
    if not usable:
        raise ModelError(
            f"no small network tells what '{absent}' is from {' or '.join(others)}",
            remedy="Train the small networks in the closing round, or match by cosine, l1 or l2.",
        )
    each = []
    for m in usable:
        if matcher.trained:
            values, among = _by_networks(r[m], absent, tables[absent], matcher, networks[m])
        else:
            values, among = SCORES[matcher.metric](r[m], tables[m].rows), tables[m].valid & tables[absent].valid
        each.append(Scores(values, among & has[m].unsqueeze(1) if m in has else among))
    values, among = averaged(each)
    if matcher.metric == "classifier":  # ln p / T in the softmax gives p^(1/T), at T = 1 p itself
        values = values.clamp(min=SMALLEST_PROBABILITY).log()
    return Scores(values, among)


def choose(scores: Scores, matcher: Matcher, size: int) -> tuple[Tensor, Tensor]:
    """The best k rows [B, k] (-1: none) of a table of ``size`` rows, and their weights [B, k]."""
    best, index = torch.where(scores.among, scores.values, EXCLUDED).topk(min(matcher.k, size), dim=1)
    usable = scores.among[index] if scores.among.ndim == 1 else scores.among.gather(1, index)  # [B, k]
    weights = (best / matcher.temperature).softmax(dim=1) * usable
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(usable, index, -1), weights / torch.where(total > 0, total, 1.0)


def mix(rows: Tensor, weights: Tensor, table: Table) -> Tensor:
    """The weighted sum [B, d] of a table's ``rows`` [B, k]; a row of -1 has the weight 0."""
    return (weights.unsqueeze(2) * table.rows[rows.clamp(min=0)]).sum(dim=1)


def averaged(each: Sequence[Scores]) -> Scores:
    """Scores by several modalities as one: of each row of the table the mean over those that may match it.

    Of one modality its own, to the bit. At least one.
    """
    if len(each) == 1:
        return each[0]
    counts = torch.stack([among.expand_as(scores) for scores, among in each]).sum(dim=0)
    total = torch.stack([torch.where(among, scores, 0.0) for scores, among in each]).sum(dim=0)
    return Scores(total / counts.clamp(min=1), counts > 0)


def cosine(r: Tensor, rows: Tensor) -> Tensor:
    """Cosines [B, P] of r [B, d] with the rows [P, d]."""
    return unit(r) @ unit(rows).T


def l1(r: Tensor, rows: Tensor) -> Tensor:
    """-sum|r - row| [B, P]."""
    return -(r.unsqueeze(1) - rows).abs().sum(dim=2)


def l2(r: Tensor, rows: Tensor) -> Tensor:
    """-|r - row| [B, P]."""
    # Not from |r|^2 - 2 r.row + |row|^2, which loses the digits of small distances.
    return -(r.unsqueeze(1) - rows).square().sum(dim=2).clamp(min=SMALLEST_NORM**2).sqrt()


#: Scores (r [B, d], rows [P, d]) -> [B, P] by the metrics that need no trained network; larger is nearer.
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine, "l1": l1, "l2": l2}


def _by_networks(
    r: Tensor, absent: str, other: Table, matcher: Matcher, networks: Sequence[tuple[float, Network]]
) -> Scores:
    """The mean of the networks' scores by their weights. A classifier knows nothing of rows beyond its classes."""
    total = sum(weight for weight, _ in networks)
    if not (total > 0 and all(weight >= 0 for weight, _ in networks)):
        raise ModelError(
            f"the devices' weights {[weight for weight, _ in networks]} are not shares of anything",
            remedy="Weigh by samples: none below zero, and not all zero.",
        )
    answers = [(weight / total, network(r, absent)) for weight, network in networks]
    if matcher.metric == "prior":
        return Scores(torch.stack([share * cosine(h, other.rows) for share, h in answers]).sum(dim=0), other.valid)
    scores = torch.stack([share * logits.softmax(dim=1) for share, logits in answers]).sum(dim=0)
    size, classes = len(other.rows), scores.shape[1]
    known = torch.arange(size, device=other.valid.device) < classes
    return Scores(F.pad(scores, (0, size - classes)), other.valid & known)
