"""The partition of training samples among devices: a seeded split that every method shares.

natural: by group (person, speaker, vendor, recording), a group never in two shares. uniform: at random, equal sizes.
dirichlet: each class is cut in proportions drawn from Dirichlet(α) over the devices (Hsu et al., arXiv 1909.06335);
small α: each device sees few classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array
from edgefl.errors import DataError

Indices = npt.NDArray[np.int64]


class _Samples(NamedTuple):
    """The samples to split: ``total`` of them, with ``labels`` [N] and ``groups`` [N] where there are any."""

    labels: Array | None
    groups: Array | None
    total: int
    names: Sequence[str]


_Method = Callable[[_Samples, int, dict[str, Any], np.random.Generator], list[Indices]]


def partition(
    labels: npt.NDArray[np.int64] | None,
    groups: Array | None,
    n: int,
    how: Mapping[str, Mapping[str, Any] | None],
    seed: int,
    *,
    count: int | None = None,
    names: Sequence[str] = (),
) -> list[Indices]:
    """``n`` disjoint shares (sorted indices) that together hold every sample; the same for the same seed.

    ``labels`` [N], ``groups`` [N]: each may be None when the method does not need it; then ``count`` is N. ``how``: one
    of {"natural": {}}, {"uniform": {}}, {"dirichlet": {"alpha": 0.5, "minimum": 1}}. ``names``: the devices, for
    messages. Raises DataError for an unknown method or option, and rather than returning an empty share.
    """
    total = next((len(a) for a in (labels, groups) if a is not None), count)
    if total is None or n < 1:
        raise DataError(f"{total} samples can not be shared by {n} devices", remedy="Give a data set and a fleet.")
    if len(how) != 1 or next(iter(how)) not in METHODS:
        raise DataError(f"unknown partition {', '.join(how) or '(none)'!s}", remedy=f"Valid: {', '.join(METHODS)}.")
    ((method, options),) = how.items()
    if total < n:
        raise _empty(names, total, f"there are {total} samples for {n} devices", f"Use at most {total} devices.")
    samples, rng = _Samples(labels, groups, total, names), np.random.default_rng(seed)
    return [np.sort(share) for share in METHODS[method](samples, n, dict(options or {}), rng)]


def _empty(names: Sequence[str], share: int, why: str, remedy: str) -> DataError:
    who = f"device {names[share]!r}" if share < len(names) else f"device number {share + 1}"
    return DataError(f"the share of {who} would be empty: {why}", remedy=remedy)


def _options(method: str, given: dict[str, Any], valid: Sequence[str] = ()) -> None:
    unknown = sorted(set(given) - set(valid))
    if unknown:
        raise DataError(
            f"partition {method} has no option {', '.join(unknown)}",
            remedy=f"Valid options: {', '.join(valid) or 'none'}.",
        )


def _natural(samples: _Samples, n: int, options: dict[str, Any], rng: np.random.Generator) -> list[Indices]:
    """A group that is called as a device is that device's. As many groups as devices: the others in sorted order, one
    for each device that has none. More groups: each in turn joins the smallest share.
    """
    _options("natural", options)
    if samples.groups is None:
        raise DataError(
            "partition natural needs groups, and this data set has none",
            remedy='Add "group" to each sample, or set data.partition to uniform or dirichlet.',
        )
    found, inverse, sizes = np.unique(samples.groups, return_inverse=True, return_counts=True)
    if len(found) < n:
        remedy = f"Use at most {len(found)} devices, or set data.partition to uniform or dirichlet."
        raise _empty(samples.names, len(found), f"there are {len(found)} groups for {n} devices", remedy)
    device = {str(name): share for share, name in enumerate(samples.names)}
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


def _uniform(samples: _Samples, n: int, options: dict[str, Any], rng: np.random.Generator) -> list[Indices]:
    _options("uniform", options)
    return list(np.array_split(rng.permutation(samples.total), n))


def _dirichlet(samples: _Samples, n: int, options: dict[str, Any], rng: np.random.Generator) -> list[Indices]:
    """Shares below ``minimum`` are filled with random samples of the largest share: small α leaves many empty.

    ``within`` 1: each group (person, speaker) is shared out by itself, to as many devices as any other.
    """
    _options("dirichlet", options, ["alpha", "minimum", "within"])
    alpha, minimum = float(options.get("alpha", 0.5)), int(options.get("minimum", 1))
    if options.get("within"):
        return _within(samples, n, {"alpha": alpha, "minimum": minimum}, rng)
    if not 0 < alpha < float("inf") or minimum < 1:
        raise DataError(
            f"partition dirichlet: alpha is {alpha:g}, minimum {minimum}",
            remedy="Set alpha above 0 (0.1: strong skew, 100: nearly none) and minimum to 1 or more.",
        )
    labels, total = samples.labels, samples.total
    if labels is None:
        raise DataError(
            "partition dirichlet needs labels, and this data set has none", remedy="Set data.partition to uniform."
        )
    if total < n * minimum:
        remedy = f"Use at most {total // minimum} devices, or a smaller minimum."
        why = f"{n} devices x {minimum} samples exceed the {total} there are"
        raise _empty(samples.names, total // minimum, why, remedy)
    shares: list[list[int]] = [[] for _ in range(n)]
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


def _within(samples: _Samples, n: int, options: dict[str, Any], rng: np.random.Generator) -> list[Indices]:
    if samples.groups is None:
        raise DataError(
            "partition dirichlet within groups needs groups, and this data set has none",
            remedy="Leave the option within away, or set data.partition to uniform.",
        )
    owners = np.unique(samples.groups)
    if n % len(owners):
        raise DataError(
            f"{n} devices can not be shared evenly by {len(owners)} groups",
            remedy=f"Use a multiple of {len(owners)} devices.",
        )
    shares: list[Indices] = []
    for i, owner in enumerate(owners):
        mine, each = np.flatnonzero(samples.groups == owner), n // len(owners)
        labels = None if samples.labels is None else samples.labels[mine]
        own = _Samples(labels, None, len(mine), samples.names[i * each : (i + 1) * each])
        shares += [mine[share] for share in _dirichlet(own, each, options, rng)]
    return shares


METHODS: dict[str, _Method] = {"natural": _natural, "uniform": _uniform, "dirichlet": _dirichlet}
