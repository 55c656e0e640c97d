"""The value everything else works on: samples of several modalities, any of which may be absent.

As a file (.npz): arrays ``<modality>`` [N, ...], ``<modality>.present`` [N], ``label`` [N], ``label_names`` [C],
``ids`` [N], ``group`` [N] and, where samples are windows of recordings, ``ids.recording`` [N]; of these only the
modalities are required. Labels are whole numbers (-1: none; places in ``label_names`` where that is there), names
("": none), or a numeric target as floating-point numbers (NaN: none); or ``label`` [N, C] is 1 for each class that a
sample is of, and 0 (a row of -1: none is known).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import MAX_DATASET_BYTES, Array, Indices, Rows, chosen, npz_names, read_npz, write_npz
from edgefl.data.encoders import Encoders
from edgefl.data.label_arrays import labels_of
from edgefl.data.label_sets import Sets, classes_in, first_classes, in_words, one_class_each, plain_names, renumbered
from edgefl.data.labels import class_name, class_names, places_of
from edgefl.data.levels import Targets, levels_in, nearest_level
from edgefl.data.values import as_cells, as_values
from edgefl.errors import DataError, Problem
from edgefl.label_spaces import samples_key, space_of, spaces_in, words_of
from edgefl.patterns import pattern_counts
from edgefl.records import MODALITY_RULE, is_modality

Flags = npt.NDArray[np.bool_]

#: Names of labels in a message; a public data set's hundred fit.
SHOWN = 100
SHOWN = 20  # problems listed in an error
_RECORDING = "ids.recording"  # in a file; no modality can be called that


@dataclass(frozen=True)
class Encoded:
    """Encoded samples of a modality: tokens [N, T, D] after ``depth`` stages, and which are real [N, T] or None.

    Rows where the modality is absent hold anything.
    """

    tokens: Rows
    mask: Flags | None
    depth: int

    def rows(self, rows: Indices) -> Encoded:
        """The encoded values of some samples."""
        return Encoded(chosen(self.tokens, rows), None if self.mask is None else self.mask[rows], self.depth)


@dataclass(frozen=True, eq=False)
class Dataset:
    """N samples. Rows where a modality is absent hold zeros; a modality of no sample is left out.

    ``modalities``: name -> [N, *shape] float32, or int64 token ids; ``present``: name -> [N] bool;
    ``labels``: [N] int64, -1 for none, or None when nothing is labelled; ``groups``: [N] strings, who or what a
    sample came from (a person, a speaker), used to share samples out; ``skipped``: bad samples that were left out, and
    what was left out of good ones; ``recordings``: [N] strings, what each sample is a window of, None: of nothing;
    ``encoded``: what a model is shown in place of a modality's own values, from a part of it that is frozen;
    ``resizable``: modalities that were read from files which can be read again to another shape; ``whole``: [N] bool,
    samples that had every modality before zeros took the place of absent ones, None: none did; ``targets``: [N]
    float64, NaN for none, of a numeric target, whose ``labels`` are the nearest levels; None: labels are classes;
    ``sets``: [N, C] bool, the classes of each sample where it may have several (``edgefl.data.label_sets``);
    ``notes``: sentences on what a model's columns are in a file, or that it lacks them.
    """

    modalities: Mapping[str, Rows]
    present: dict[str, Flags]
    labels: Indices | None
    label_names: tuple[str, ...]
    ids: list[str]
    groups: Array | None = None
    skipped: list[Problem] = field(default_factory=list)
    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    resizable: frozenset[str] = frozenset()
    recordings: Array | None = None
    whole: Flags | None = None
    targets: Targets | None = None
    sets: Sets | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.ids)

    def signature(self) -> dict[str, tuple[int, ...]]:
        """Modality -> shape of one sample, for the modalities that at least one sample has."""
        return {m: tuple(a.shape[1:]) for m, a in self.modalities.items() if self.present[m].any()}

    def samples(self) -> dict[str, int]:
        """Modality -> samples that have it; "" -> all samples (as a device says it in its hello).

        Where a sample lacks a modality, also by pattern (``edgefl.patterns``); where labels are of sets of their own,
        ``label_spaces.samples_key`` -> samples with a label of that set.
        """
        counts, spaces = self.class_counts(), spaces_in(self.label_names)
        labelled = {samples_key(space): sum(counts[c] for c in places) for space, places in spaces.items()}
        there = {key: count for key, count in labelled.items() if count}
        present = {m: self.present[m] for m in self.signature()}
        return {"": len(self)} | {m: int(flags.sum()) for m, flags in present.items()} | pattern_counts(present) | there

    def has(self, modality: str) -> Flags:
        """[N] bool: which samples have this modality; none, when the data set does not know it."""
        known = self.present.get(modality)
        return np.zeros(len(self), dtype=bool) if known is None else known

    def complete(self, modalities: Sequence[str]) -> Flags:
        """[N] bool: samples with all of these modalities, none filled in."""
        complete: Flags = np.logical_and.reduce([self.has(m) for m in modalities])
        return complete if self.whole is None else complete & self.whole

    def class_counts(self) -> tuple[int, ...]:
        """Labelled samples of each class."""
        if self.sets is not None:
            return tuple(self.sets.sum(axis=0).tolist())
        known = np.empty(0, np.int64) if self.labels is None else self.labels[self.labels >= 0]
        return tuple(np.bincount(known, minlength=len(self.label_names)).tolist())

    def subset(self, indices: npt.ArrayLike) -> Dataset:
        """The samples at ``indices`` ([n] int, or [N] bool), in that order."""
        rows = np.asarray(indices)
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        return replace(
            self,
            modalities={m: chosen(a, rows) for m, a in self.modalities.items()},
            present={m: p[rows] for m, p in self.present.items()},
            labels=None if self.labels is None else self.labels[rows],
            ids=[self.ids[i] for i in rows],
            groups=None if self.groups is None else self.groups[rows],
            recordings=None if self.recordings is None else self.recordings[rows],
            encoded={m: e.rows(rows) for m, e in self.encoded.items()},
            whole=None if self.whole is None else self.whole[rows],
            targets=None if self.targets is None else self.targets[rows],
            sets=None if self.sets is None else self.sets[rows],
        )

    def relabelled(self, names: Sequence[str]) -> Dataset:
        """The same with labels numbered as in ``names``. Raises DataError for a label that is in use and not named.

        Whole numbers count ``names`` where none of these is a number. Where ``names`` are levels of a numeric target,
        labels that are numbers become targets; where samples may have several, one label is a set. Where they say label
        sets, labels of others are none.
        """
        if classes_in(names) is not None:
            return self._in_sets(names)
        if self.sets is not None:
            raise DataError(
                f"samples have several labels, and the model knows one of {_few(names)} each",
                remedy="Give each sample one label, or leave this device out of the run.",
            )
        if (levels := levels_in(names)) is not None:
            targets = self._as_targets()
            labels = None if targets is None else nearest_level(targets, levels)
            return replace(self, targets=targets, labels=labels, label_names=tuple(names))
        if self.targets is not None:
            raise DataError(
                f"the labels are numbers such as {np.nanmedian(self.targets):g}, and the model knows: {_few(names)}",
                remedy="Give names of classes, or whole numbers.",
            )
        if self.labels is None or tuple(names) == self.label_names:
            return replace(self, label_names=tuple(names))
        number = places_of(names)
        places = [number.get(class_name(name), -1) for name in self.label_names]
        used = [
            self.label_names[i] for i in np.flatnonzero(np.bincount(self.labels[self.labels >= 0])) if places[i] < 0
        ]
        spaces = spaces_in(names)
        unknown = [name for name in used if not spaces or space_of(name) in {"", *spaces}]
        if unknown:
            raise DataError(
                f"labels not known to the model: {_few(unknown)}; it knows: {_few(names)}",
                remedy="Correct the labels, or list them in labels.json beside the manifest.",
            )
        return replace(self, labels=np.array([*places, -1], np.int64)[self.labels], label_names=tuple(names))

    def label_words(self, row: int) -> str | None:
        """The classes of a sample in words; None: it has no label."""
        if self.labels is None or self.labels[row] < 0:
            return None
        classes = classes_in(self.label_names)
        name: str = (words_of(self.label_names) or self.label_names)[self.labels[row]]
        return name if self.sets is None or classes is None else in_words(self.sets[row], classes)

    def _in_sets(self, names: Sequence[str]) -> Dataset:
        if self.targets is not None:
            raise DataError("the labels are numbers, and the model knows classes", remedy="Give names of classes.")
        if self.labels is None:
            return replace(self, label_names=tuple(names))
        sets = one_class_each(self.labels, len(self.label_names)) if self.sets is None else self.sets
        sets = renumbered(sets, plain_names(self.label_names), plain_names(names))
        return replace(self, sets=sets, labels=first_classes(sets, self.labels >= 0), label_names=tuple(names))

    def _as_targets(self) -> Targets | None:
        """Targets, of whole numbers and names of numbers too. Raises DataError for other names."""
        if self.targets is not None or self.labels is None:
            return self.targets
        try:
            numbers = np.array([float(name) for name in self.label_names] + [np.nan])
        except ValueError:
            raise DataError(
                f"the labels are names ({_few(self.label_names)}), and the model predicts a number",
                remedy="Give numbers as labels, or leave this device out of the run.",
            ) from None
        return numbers[self.labels]

    def save_npz(self, path: Path | str, *, durable: bool = True) -> None:
        """Write to ``path``, whole or not at all; ``durable`` through a power cut. Raises StoreError."""
        write_npz(Path(path), self._arrays(), durable=durable)

    def as_saved(self) -> Dataset:
        """The samples as ``load_npz`` reads what ``save_npz`` writes."""
        return _assemble(self._arrays(), list(self.modalities), {})

    def _arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {m: np.asarray(values) for m, values in self.modalities.items()}
        arrays |= {f"{m}.present": p for m, p in self.present.items()}
        if self.labels is not None:
            arrays["label"] = self.labels if self.targets is None else self.targets
        if self.sets is not None and self.labels is not None:
            arrays["label"] = np.where((self.labels >= 0)[:, None], self.sets, -1).astype(np.int8)
        arrays["label_names"] = np.array(self.label_names, dtype=np.str_)
        arrays["ids"] = np.array(self.ids, dtype=np.str_)
        if self.groups is not None:
            arrays["group"] = self.groups
        if self.recordings is not None:
            arrays[_RECORDING] = self.recordings
        return arrays

    @staticmethod
    def load_npz(path: Path | str, encoders: Encoders | None = None, *, mapped: bool = False) -> Dataset:
        """Read ``path``; with ``encoders`` only these modalities. Raises DataError (missing, damaged, inconsistent).

        ``mapped``: a file that ``save_npz`` wrote, whose large arrays are read-only pages that processes share.

        Values become float32; unsigned bytes are pixels and become 0..1; other integers, and everything of a text
        encoder, are token ids (int64). Grey pictures get one channel. Feature vectors [N, d] become signals [N, d, 1];
        of a table encoder cells [N, d, 2], of which NaN is one that is not there.
        """
        path = Path(path)
        kinds = None if encoders is None else {m: e.kind for m, e in encoders.items()}
        extras = {"label", "label_names", "ids", "group", _RECORDING}
        wanted = None if kinds is None else {*extras, *kinds, *(f"{m}.present" for m in kinds)}
        arrays = read_npz(path, wanted, mapped=mapped)
        names = [name for name in arrays if name not in extras and not name.endswith(".present")]
        if not names:
            which = "" if kinds is None else f" called {' or '.join(kinds)}"
            there = " and ".join(name for name in npz_names(path) if is_modality(name))
            raise DataError(
                f"{path}: no modality{which} inside{f', only {there}' if there else ''}",
                remedy="Store one array [N, ...] a modality, under the name of its encoder.",
            )
        try:
            return _assemble(arrays, names, kinds or {})
        except DataError as error:
            raise DataError(f"{path}: {error.message}", remedy=error.remedy) from None


def decide(problems: list[Problem], good: int, bad_samples: str, where: str) -> None:
    """Raise DataError when there are problems and ``bad_samples`` is not "skip", or when no sample is good."""
    if bad_samples not in {"error", "skip"}:
        raise DataError(f"bad_samples is {bad_samples!r}", remedy="Set data.bad_samples to error or skip.")
    if problems and (bad_samples == "error" or not good):
        more = [f"  … and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        listed = "\n".join([f"  {problem}" for problem in problems[:SHOWN]] + more)
        noun = "problem" if len(problems) == 1 else "problems"
        none = "" if good else "; no good sample is left"
        remedy = None if good else "Mend the samples named above: leaving them out would leave none."
        raise DataError(f"{where}: {len(problems)} {noun}{none}\n{listed}", remedy=remedy)
    if not good:
        raise DataError(f"{where}: holds no sample", remedy="Add samples, or leave this device out of the run.")


def _assemble(arrays: dict[str, Array], names: list[str], kinds: Mapping[str, str]) -> Dataset:
    for name in {"ids", "label_names"} & arrays.keys():
        if arrays[name].ndim != 1:
            raise DataError(f"array {name!r} has shape {arrays[name].shape}: one name after the other is expected")
    room = 0
    for name in names:
        shape, dtype = arrays[name].shape, arrays[name].dtype
        if len(shape) < 2:
            raise DataError(f"array {name!r} has shape {shape}: a modality has samples along the first axis")
        # Small integers become float32 or int64: what they take then is bounded before it is taken.
        room += arrays[name].size * (8 if dtype.kind in "iu" and dtype != np.uint8 else 4)
        kind = kinds.get(name, "")
        if kind == "table" and len(shape) == 2:
            room += arrays[name].size * 4
            arrays[name] = as_cells(arrays[name])
        elif kind == "vision" and len(shape) == 3:
            arrays[name] = arrays[name][:, :, :, None]  # grey pictures
        elif len(shape) == 2 and (kind == "sensor" or (not kind and dtype.kind == "f")):
            arrays[name] = arrays[name][:, :, None]  # features: a signal of one channel, as a list of numbers is
    if room > MAX_DATASET_BYTES:
        raise DataError(
            f"{room} bytes of samples in memory, more than the limit of {MAX_DATASET_BYTES}",
            remedy="Split the data set over several devices, or make the samples smaller.",
        )
    count = len(arrays[names[0]])
    flags = {m: np.asarray(arrays.get(f"{m}.present", np.ones(count)), dtype=bool) for m in names}
    modalities = {m: as_values(arrays.pop(m), kinds.get(m, "")) for m in names}
    for m, values in modalities.items():
        if flags[m].shape == (len(values),) and values.flags.writeable:  # what is mapped was saved with zeros
            values[~flags[m]] = 0
    labels = labels_of(arrays.get("label"), tuple(str(name) for name in arrays.get("label_names", ())))
    known = labels.numbers is not None and bool((labels.numbers != -1).any())
    return Dataset(
        modalities=modalities,
        present=flags,
        labels=labels.numbers if known else None,
        label_names=labels.names,
        ids=[str(i) for i in arrays.get("ids", range(count))],
        groups=None if "group" not in arrays else class_names(arrays["group"].astype(np.str_)),
        recordings=None if _RECORDING not in arrays else arrays[_RECORDING].astype(np.str_),
        targets=labels.targets if known else None,
        sets=labels.sets if known else None,
    )


def _few(names: Sequence[str]) -> str:
    """Names for a message, which shows the first of many."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _check(data: Dataset) -> None:
    count = len(data.ids)
    flat: dict[str, Array] = {f"array '{m}.present'": p for m, p in data.present.items()}
    flat |= {} if data.labels is None else {"array 'label'": data.labels}
    flat |= {} if data.groups is None else {"array 'group'": data.groups}
    flat |= {} if data.targets is None else {"targets": data.targets}
    flat |= {} if data.recordings is None else {f"array '{_RECORDING}'": data.recordings}
    for name, one in flat.items():
        if one.ndim != 1:
            raise DataError(f"{name} has shape {list(one.shape)}: one value for each sample is expected")
    lengths = {f"array {m!r}": len(a) for m, a in data.modalities.items()} | {n: len(one) for n, one in flat.items()}
    for name, length in lengths.items():
        if length != count:
            listed = ", ".join(f"{each} {rows}" for each, rows in lengths.items() if not each.endswith(".present'"))
            raise DataError(
                f"{name} has {length} rows, but there are {count} samples",
                remedy=f"Give every array one row a sample, in one order ({listed}); where a sample lacks a modality, "
                "any row stands for it and '<modality>.present' is false.",
            )
    if data.sets is not None and data.sets.shape != (count, len(data.label_names)):
        raise DataError(f"sets of labels have shape {list(data.sets.shape)}, not {[count, len(data.label_names)]}")
    if set(data.modalities) != set(data.present):
        raise DataError(f"modalities {sorted(data.modalities)} and presence flags {sorted(data.present)} differ")
    for name, values in data.modalities.items():
        if not is_modality(name):
            raise DataError(f"{name!r} cannot name a modality", remedy=f"Use {MODALITY_RULE}.")
        if values.dtype not in (np.float32, np.int64):
            raise DataError(f"array {name!r} has type {values.dtype}, not float32 or int64")
    if data.labels is not None and count:
        low, high = int(data.labels.min()), int(data.labels.max())
        if low < -1 or high >= len(data.label_names):
            raise DataError(
                f"label {low if low < -1 else high} is out of range: there are {len(data.label_names)} classes",
                remedy="Number the labels from 0; -1 means no label.",
            )
