"""The test set that is held out of a run's own samples: whole people or recordings, and every class on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from edgefl.config.settings import DataConfig
from edgefl.data.arrays import Array, Indices, generator
from edgefl.data.dataset import Dataset, Flags
from edgefl.data.label_sets import plain_names
from edgefl.errors import DataError

#: Share of the samples that are held out for tests, where none are given or marked.
TEST_SHARE = 0.2
#: Least number of groups, and largest share of the samples, for a test set of whole groups.
_LEAST_GROUPS, _MOST_HELD = 3, 0.4
#: Share of the samples in a test set of whole groups beyond which a warning says so.
_LARGE = 0.3
#: Entries of the table of people and classes that is looked into: a person a sample and a class a sample have more.
_MOST_ENTRIES = 10**7
_NAMED = 10  # classes in a warning


def hold_out(data: Dataset, config: DataConfig, devices: int, seed: int) -> tuple[Dataset, Dataset, str]:
    """(training set, test set, "groups" or "samples") with about TEST_SHARE of the samples in the test set.

    Whole groups of three or more, so that the test is on people, … left out of training, where enough of them stay: one
    a device where groups are shared out, else one; where these do not have classes of their own; and where those held
    out are not many more samples than TEST_SHARE. Otherwise the same share of each
    label (and group). Windows of one recording are never on both sides. A class that two groups or recordings have is
    on both sides; one that one alone has is trained on.
    """
    rng, kept = generator(seed, "hold out"), devices if "natural" in config.partition else 1
    groups = _whole_groups(data, kept, rng)
    test, origin = (groups, "groups") if groups is not None else (_of_each_class(data, rng), "samples")
    if not test.any() or test.all():
        count = f"{len(data)} samples" if data.recordings is None else f"{len(np.unique(data.recordings))} recordings"
        raise DataError(
            f"{count} are too few to hold {TEST_SHARE:.0%} out for the test",
            remedy="Name a test set in data.test, or add samples.",
        )
    return data.subset(~test), data.subset(test), origin


def split_warnings(train: Dataset, test: Dataset, origin: str) -> tuple[str, ...]:
    """Warnings of a split: classes on one side alone, large groups held out. ``origin``: as ``hold_out`` gives it."""
    return (*untested(train, test), *(held_groups(train, test) if origin == "groups" else ()))


def held_groups(train: Dataset, test: Dataset) -> tuple[str, ...]:
    """Warning of a large test set of whole groups; () where it is none."""
    count = len(train) + len(test)
    if test.groups is None or train.groups is None or len(test) <= _LARGE * count:
        return ()
    names = sorted(set(test.groups.tolist()))
    if set(train.groups.tolist()) & set(names):
        return ()
    some = f"{', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''}"
    return (f"the test set is all of {some}: {len(test)} of {count} samples (docs/data.md, the test set)",)


def untested(train: Dataset, test: Dataset) -> tuple[str, ...]:
    """Warnings of classes that one of the two, of the same names of labels, has samples of alone."""
    if _classes(train) is None or _classes(test) is None:
        return ()
    names = plain_names(train.label_names)
    pairs = list(zip(names, train.class_counts(), test.class_counts(), strict=True))
    lacking = [name for name, trained, tested in pairs if trained and not tested]
    alone = [name for name, trained, tested in pairs if tested and not trained]
    found = []
    if lacking:
        found.append(f"the test set has no sample of {_some(lacking, names)}, so that its scores leave them out")
    if alone:
        found.append(f"no device trains on {_some(alone, names)}, which the test set has")
    return tuple(found)


def _some(few: Sequence[str], names: Sequence[str]) -> str:
    return f"{len(few)} of {len(names)} classes ({', '.join(few[:_NAMED])}{', …' if len(few) > _NAMED else ''})"


def _classes(data: Dataset) -> Indices | None:
    """The class of each sample [N], -1: none; None where there are no classes."""
    return None if data.targets is not None else data.labels


def _whole_groups(data: Dataset, kept: int, rng: Generator) -> Flags | None:
    """The samples [N] of the groups that are held out; None where too few are there, or each has its own classes."""
    if data.groups is None:
        return None
    named = np.flatnonzero(data.groups != "")
    names, group = np.unique(data.groups[named], return_inverse=True)
    held = min(max(1, round(TEST_SHARE * len(names))), len(names) - kept)
    if held <= 0 or len(names) < _LEAST_GROUPS:
        return None
    order, test = rng.permutation(len(names)), np.zeros(len(names), dtype=bool)
    test[order[:held]] = True
    labels = _classes(data)
    known = np.zeros(len(named), dtype=bool) if labels is None else labels[named] >= 0
    if labels is not None and known.any():
        classes, label = np.unique(labels[named][known], return_inverse=True)
        if len(names) * len(classes) <= _MOST_ENTRIES:
            has = np.zeros((len(names), len(classes)), dtype=bool)
            has[group[known], label] = True
            if 2 * (has.sum(axis=0) > 1).sum() < len(classes):
                return None
            test = _covering(has, test, order, len(names) - kept)
    flags = np.zeros(len(data), dtype=bool)
    flags[named] = test[group]
    return flags if flags.mean() <= _MOST_HELD else None


def _covering(has: Array, test: Flags, order: Indices, most: int) -> Flags:
    """The groups [G] of the test, changed so that each class is on both sides.

    ``has`` [G, K]: group has class; ``order`` [G]: who changes first; ``most``: groups of the test at most.
    """
    test, held, times = test.copy(), int(test.sum()), has.sum(axis=0)

    def stays(g: int) -> bool:
        """Whether group ``g`` can change sides without taking a shared class away from its own."""
        return bool(((has[test == test[g]].sum(axis=0) > has[g]) | ~has[g] | (times == 1)).all())

    for c in np.argsort(times, kind="stable"):
        for side in (True, False) if times[c] > 1 else (False,):
            movable = [g for g in order if test[g] != side and has[g, c] and stays(g)]
            allowed = test.sum() < most if side else test.sum() > 1
            if not has[test == side][:, c].any() and movable and allowed:
                test[movable[0]] = side
    for g in order[::-1]:
        if test[g] and test.sum() > held and stays(g):
            test[g] = False
    return test


def _of_each_class(data: Dataset, rng: Generator) -> Flags:
    """Stratified test split: flags [N] of about a fifth of the units.

    Unit: a recording, or a sample without one. Strata: group and class, in random order within. Then a class with
    several units gets at least one on each side; a class with one unit is only trained on.
    """
    first, unit = _units(data)
    labels = np.zeros(len(first), dtype=np.int64) if data.labels is None else data.labels[first]
    groups = np.zeros(len(first)) if data.groups is None else np.unique(data.groups, return_inverse=True)[1][first]
    draw, place = rng.random(len(first)), np.arange(len(first))
    order = np.lexsort((draw, labels, groups))  # then every fifth: even in each stratum
    test = np.zeros(len(first), dtype=bool)
    test[order[np.floor((place + 1) * TEST_SHARE) > np.floor(place * TEST_SHARE)]] = True
    if _classes(data) is not None:
        better = test.copy()
        by_class = np.lexsort((draw, labels))
        for units in np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1):
            if labels[units[0]] >= 0 and better[units].all():
                better[units[-1]] = False
            elif labels[units[0]] >= 0 and len(units) > 1 and not better[units].any():
                better[units[0]] = True
        test = better if better.any() else test
    return np.isin(unit, np.flatnonzero(test))


def _units(data: Dataset) -> tuple[Indices, Indices]:
    """Units of a hold-out, samples or recordings: the first sample of each, and each sample's unit."""
    if data.recordings is None:
        every = np.arange(len(data))
        return every, every
    _, first, unit = np.unique(data.recordings, return_index=True, return_inverse=True)
    return first, unit
