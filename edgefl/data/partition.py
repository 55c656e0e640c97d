"""The partition of training samples among devices, and the modalities taken away from a device's share: both seeded.

natural: by group (person, speaker, vendor, recording), a group never in two shares. uniform: at random, equal sizes.
dirichlet: each class is cut in proportions drawn from Dirichlet(α) over the devices (Hsu et al., arXiv 1909.06335);
small α: each device sees few classes.
shards: samples in order of class are cut into shards, which are dealt at random, as many to each device or one more:
one for each class (FedMVP, arXiv 2406.11048, section 4: C/10 classes to each of 10 devices), or ``each`` a device
(McMahan et al., arXiv 1602.05629: 2, of equal size).
drawn: each device draws ``each`` samples by itself, without replacement; others may have them too, so that there may be
more devices than samples. With ``alpha`` its classes have proportions drawn from Dirichlet(alpha); of a class that is
drawn more often than it has samples, some come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator

from edgefl.config.settings import MissingConfig
from edgefl.data.arrays import Array, Indices, generator
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError

Options = Mapping[str, float]
#: Method of a partition -> its options.
How = Mapping[Literal["natural", "uniform", "dirichlet", "shards", "drawn"], Options | None]


class Samples(NamedTuple):
    """The samples to split: ``total`` of them, with ``labels`` [N] and ``groups`` [N] where there are any."""

    labels: Array | None
    groups: Array | None
    total: int


_Method = Callable[[Samples, Sequence[str], Options, Generator], list[Indices]]


def partition(samples: Samples, devices: Sequence[str], how: How, seed: int) -> list[Indices]:
    """One share (sorted indices) a device, disjoint, together every sample; the same for the same seed.

    ``how``: one of {"natural": {}}, {"uniform": {}}, {"dirichlet": {"alpha": 0.5, "minimum": 1}}, {"shards": {"each":
    2}} and {"drawn": {"each": 20}}, whose shares overlap. Raises DataError for an unknown method or option, and rather
    than returning an empty share.
    """
    if (draw := drawing(samples, how, seed)) is not None:
        return [draw(device) for device in devices]
    if len(how) != 1 or next(iter(how)) not in METHODS:
        raise DataError(
            f"unknown partition {', '.join(how) or '(none)'!s}", remedy=f"Valid: {', '.join((*METHODS, DRAWN))}."
        )
    ((method, given),) = how.items()
    (split, valid), options, total, n = METHODS[method], dict(given or {}), samples.total, len(devices)
    if unknown := sorted(set(options) - set(valid)):
        raise DataError(
            f"partition {method} has no option {', '.join(unknown)}",
            remedy=f"Valid options: {', '.join(valid) or 'none'}.",
        )
    if total < n:
        remedy = f"Use at most {total} devices, or data.partition {{drawn: {{each: 20}}}}, whose shares overlap."
        raise _empty(devices[total], f"there are {total} samples for {n} devices", remedy)
    return [np.sort(share) for share in split(samples, devices, options, np.random.default_rng(seed))]


def drawing(samples: Samples, how: How, seed: int) -> Callable[[str], Indices] | None:
    """The draw of a device's share (sorted indices) by its name alone; None for a partition. Raises DataError."""
    if DRAWN not in how:
        return None
    options = dict(how[DRAWN] or {})
    each, alpha = options.get("each", 0), float(options.get("alpha", 0))
    if set(options) - {"each", "alpha"} or not (1 <= each <= samples.total and each == int(each)) or alpha < 0:
        given = ", ".join(f"{name}: {value:g}" for name, value in options.items()) or "no options"
        raise DataError(
            f"partition drawn has {given}, and there are {samples.total} samples",
            remedy="Give each, the samples of a device, and alpha above 0 where its classes are to be skewed.",
        )
    if alpha and samples.labels is None:
        raise DataError("partition drawn by classes needs labels, and there are none", remedy="Leave alpha out.")
    groups = [] if samples.labels is None else [np.flatnonzero(samples.labels == c) for c in np.unique(samples.labels)]

    def draw(device: str) -> Indices:
        rng = generator(seed, f"drawn {device}")
        if not alpha:
            return np.sort(rng.choice(samples.total, int(each), replace=False))
        counts = rng.multinomial(int(each), rng.dirichlet(np.full(len(groups), alpha)))
        few = [rng.choice(rows, n, replace=n > len(rows)) for rows, n in zip(groups, counts, strict=True)]
        return np.sort(np.concatenate(few))

    return draw


def _empty(device: str, why: str, remedy: str) -> DataError:
    return DataError(f"the share of device {device!r} would be empty: {why}", remedy=remedy)


def _natural(samples: Samples, devices: Sequence[str], options: Options, rng: Generator) -> list[Indices]:
    """A group that is called as a device is that device's. As many groups as devices: the others in sorted order, one
    for each device that has none. More groups: each in turn joins the smallest share.
    """
    if samples.groups is None:
        raise DataError(
            "partition natural needs groups, and this data set has none",
            remedy='Add "group" to each sample, or set data.partition to uniform or dirichlet.',
        )
    n = len(devices)
    found, inverse, sizes = np.unique(samples.groups, return_inverse=True, return_counts=True)
    if len(found) < n:
        remedy = f"Use at most {len(found)} devices, or set data.partition to uniform or dirichlet."
        raise _empty(devices[len(found)], f"there are {len(found)} groups for {n} devices", remedy)
    device = {name: share for share, name in enumerate(devices)}
    owner = np.array([device.get(str(group), -1) for group in found], dtype=np.int64)
    if len(found) == n:
        owner[owner < 0] = np.setdiff1d(np.arange(n), owner)
    else:
        load = np.bincount(owner[owner >= 0], weights=sizes[owner >= 0], minlength=n)
        order = rng.permutation(len(found))
        for group in order[np.argsort(-sizes[order], kind="stable")]:  # large ones first: even shares
            if owner[group] < 0:
                owner[group] = load.argmin()
                load[owner[group]] += sizes[group]
    return [np.flatnonzero(owner[inverse.reshape(-1)] == share) for share in range(n)]


def _uniform(samples: Samples, devices: Sequence[str], options: Options, rng: Generator) -> list[Indices]:
    return list(np.array_split(rng.permutation(samples.total), len(devices)))


def _dirichlet(samples: Samples, devices: Sequence[str], options: Options, rng: Generator) -> list[Indices]:
    """Shares below ``minimum`` are filled with random samples of the largest share: small α leaves many empty.

    ``within`` 1: each group (person, speaker) is shared out by itself, to as many devices as any other.
    """
    if options.get("within"):
        return _within(samples, devices, {name: options[name] for name in options if name != "within"}, rng)
    alpha, minimum = float(options.get("alpha", 0.5)), int(options.get("minimum", 1))
    if not 0 < alpha < float("inf") or minimum < 1:
        raise DataError(
            f"partition dirichlet: alpha is {alpha:g}, minimum {minimum}",
            remedy="Set alpha above 0 (0.1: strong skew, 100: nearly none) and minimum to 1 or more.",
        )
    labels, total, n = samples.labels, samples.total, len(devices)
    if labels is None:
        raise DataError(
            "partition dirichlet needs labels, and this data set has none", remedy="Set data.partition to uniform."
        )
    if total < n * minimum:
        remedy = f"Use at most {total // minimum} devices, or a smaller minimum."
        why = f"{n} devices x {minimum} samples exceed the {total} there are"
        raise _empty(devices[total // minimum], why, remedy)
    shares: list[list[int]] = [[] for _ in devices]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(n, alpha)))[:-1] * len(members)).round().astype(np.int64)
        for share, piece in zip(shares, np.split(members, cuts), strict=True):
            share.extend(piece.tolist())
    for share in shares:
        while len(share) < minimum:
            largest = max(shares, key=len)
            share.append(largest.pop(int(rng.integers(len(largest)))))
    return [np.asarray(share, dtype=np.int64) for share in shares]


def _within(samples: Samples, devices: Sequence[str], options: Options, rng: Generator) -> list[Indices]:
    if samples.groups is None:
        raise DataError(
            "partition dirichlet within groups needs groups, and this data set has none",
            remedy="Leave the option within away, or set data.partition to uniform.",
        )
    owners = np.unique(samples.groups)
    if len(devices) % len(owners):
        raise DataError(
            f"{len(devices)} devices cannot be shared evenly by {len(owners)} groups",
            remedy=f"Use a multiple of {len(owners)} devices.",
        )
    each = len(devices) // len(owners)
    shares: list[Indices] = []
    for i, owner in enumerate(owners):
        mine = np.flatnonzero(samples.groups == owner)
        own = Samples(None if samples.labels is None else samples.labels[mine], None, len(mine))
        shares += [mine[share] for share in _dirichlet(own, devices[i * each : (i + 1) * each], options, rng)]
    return shares


def _shards(samples: Samples, devices: Sequence[str], options: Options, rng: Generator) -> list[Indices]:
    """Shards dealt at random. Where a device is to have ``each`` of them a class is cut where a shard is full."""
    each, labels, n = options.get("each", 0), samples.labels, len(devices)
    if labels is None:
        raise DataError(
            "partition shards needs labels, and this data set has none", remedy="Set data.partition to uniform."
        )
    if each < 0 or each != int(each):
        raise DataError(f"partition shards: each is {each:g}", remedy="Give a whole number, 0 for one shard a class.")
    mixed = rng.permutation(samples.total)
    order = mixed[np.argsort(labels[mixed], kind="stable")]
    cuts = n * int(each) if each else np.unique(labels[order], return_index=True)[1][1:]
    shards = np.array_split(order, cuts)
    if len(shards) < n or not all(map(len, shards)):
        why = f"{n} devices x {each:g} shards of {samples.total} samples" if each else f"{len(shards)} classes"
        remedy = "Give fewer devices or shards." if each else "Set each, such as 2, which cuts classes; or dirichlet."
        raise _empty(devices[min(len(shards), n) - 1 if each else len(shards)], why, remedy)
    dealt = rng.permutation(len(shards))
    return [np.concatenate([shards[i] for i in dealt[device::n]]) for device in range(n)]


#: The rule by which each device draws its own samples.
DRAWN: Literal["drawn"] = "drawn"
#: Name -> the method and its options.
METHODS: dict[str, tuple[_Method, tuple[str, ...]]] = {
    "natural": (_natural, ()),
    "uniform": (_uniform, ()),
    "dirichlet": (_dirichlet, ("alpha", "minimum", "within")),
    "shards": (_shards, ("each",)),
}


def drop(dataset: Dataset, missing: MissingConfig, seed: int, device: str) -> Dataset:
    """``dataset`` with modalities taken away, as in devices without a sensor and samples without a reading.

    Each modality of each sample is dropped with probability ``missing.rate``, independently; a sample that loses all is
    discarded, or keeps one at random (arXiv 2312.13508, section 5). With ``missing.lose: one``, floor(rate * N) of the
    N samples lose exactly one of theirs (MMiC, section 5.3), none of those that have one alone. The same for the same
    seed and device, whatever the other devices are. A modality that no sample has any more is left out. Raises
    DataError when no sample is left.
    """
    if device in missing.unlabelled:
        dataset = replace(dataset, labels=None, label_names=(), targets=None, sets=None)
    lacks: Collection[str] = missing.devices.get(device, ())
    if unknown := sorted(set(lacks) - set(dataset.modalities)):
        raise DataError(
            f"missing.devices.{device} names {', '.join(unknown)}, which the data does not have",
            remedy=f"Its modalities: {', '.join(dataset.modalities)}.",
        )
    order = sorted(dataset.modalities)  # the draw must not depend on the order of a dictionary
    had = np.stack([dataset.present[m] & (m not in lacks) for m in order], axis=1)  # [N, M]
    rng = generator(seed, f"missing {device}")
    rate = 0.0 if device in missing.complete else missing.rate
    draw, choice = rng.random(had.shape), rng.random(had.shape)
    left = _without_one(had, rate, rng) if missing.lose == "one" else had & (draw >= rate)
    if missing.keep == "one":
        lost = had.any(axis=1) & ~left.any(axis=1)
        best = np.where(had, choice, -1.0).argmax(axis=1)
        left[lost, best[lost]] = True
    kept = left.any(axis=1)
    if not kept.any():
        raise DataError(
            f"device {device!r} loses every sample: of {len(dataset)}, none keeps a modality",
            remedy="Lower data.missing.rate, set data.missing.keep: one, or leave the device a modality.",
        )
    present = {m: column.copy() for m, column in zip(order, left[kept].T, strict=True) if column.any()}
    dataset = dataset.subset(kept)
    modalities = {m: np.array(values) for m, values in dataset.modalities.items() if m in present}
    for m, values in modalities.items():
        values[~present[m]] = 0
    return replace(dataset, modalities=modalities, present={m: present[m] for m in modalities})


def _without_one(had: Array, rate: float, rng: Generator) -> Array:
    """``had`` (N, M) less one entry in floor(rate * N) rows, of those that have two or more."""
    left: Array = had.copy()
    count = int(rate * len(had) + 1e-9)  # 0.29 * 100 is a little below 29
    able = rng.permutation(np.flatnonzero(had.sum(axis=1) >= 2))[:count]
    lost = np.where(had[able], rng.random((len(able), had.shape[1])), -1.0).argmax(axis=1)
    left[able, lost] = False
    return left
