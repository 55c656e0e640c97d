"""A folder of samples: ``manifest.jsonl``, one JSON object a line.

    {"id": "w1", "label": "walking", "group": "anna", "acc": "acc/w1.npy", "gyro": [[0.1, 0.0, 0.2], …]}

``id``, ``label`` (a name, a whole number, a list of these, or a numeric target such as 3.0), ``group`` and ``meta``
(ignored) are optional; every other key is a modality (see ``readers``). An absent key, or null, is a missing modality.
``labels.json`` beside the manifest, a list of names, fixes the numbering of labels; without it the names found here are
sorted.

A line whose recordings are cut into windows gives as many samples as the recording with the fewest windows has:
``w1#0``, ``w1#1``, … with the line's label; what is not cut is in each of them. A window that touches a gap is missing.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from edgefl.data.arrays import MAX_DATASET_BYTES, Array
from edgefl.data.dataset import Dataset, decide
from edgefl.data.encoders import Encoders
from edgefl.data.label_sets import classes_in
from edgefl.data.labels import Label, as_sets, as_targets, class_name, named_labels, numbered
from edgefl.data.levels import levels_in
from edgefl.data.readers import SampleError, Target, guess, read, read_samples, target
from edgefl.data.recording import GAP, Windows, joined, least
from edgefl.data.regular_files import ANY_SIZE, regular_file, regular_file_inside
from edgefl.errors import DataError, Problem
from edgefl.records import is_modality

MAX_SAMPLES = 1_000_000  # a device's share has thousands; bounds what a stray file can make us read
MAX_LINE_BYTES = 2**20  # room for some 100,000 inline numbers; larger values belong in files
MAX_NAME = 200  # characters of an id, a label or a group: they are stored in arrays of fixed width
#: Keys of a line that are no modality.
OWN_KEYS = frozenset({"id", "label", "group", "meta"})
#: Kind -> the way out where samples differ in shape.
_ADVICE = {
    "vision": "; set {}.image_size to resize them",
    "sensor": "; set {}.window to cut them into windows of one length",
}


@dataclass
class _Row:
    line: int
    id: str
    group: str
    label: Label
    values: dict[str, Array] = field(default_factory=dict)
    windows: dict[str, Windows] = field(default_factory=dict)
    recording: str = ""  # the id of the line that this is a window of


MANIFEST = "manifest.jsonl"


class _Elsewhere(msgspec.Struct, forbid_unknown_fields=True):
    """First line of a manifest outside its data folder."""

    files: str


@dataclass
class _Folder:
    """State of reading one folder."""

    root: Path
    targets: dict[str, Target]
    closed: bool  # the modalities are given; other keys are not read
    name: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)  # what was left out of good samples
    bytes_read: int = 0
    samples: int = 0
    uneven: set[str] = field(default_factory=set)  # sensors read by guess, whose recordings differ in length

    def problem(self, line: int, message: str) -> None:
        self.problems.append(Problem(f"{self.name}:{line}", message))

    def note(self, line: int, message: str) -> None:
        self.notes.append(Problem(f"{self.name}:{line}", message))

    @property
    def resizable(self) -> frozenset[str]:
        """The modalities read by guess, whose files a model's shapes are yet to come for.

        Pictures, sounds, texts, and recordings of several lengths.
        """
        guessed = {m: to for m, to in self.targets.items() if to.guessed}
        return frozenset(m for m, to in guessed.items() if to.kind != "sensor" or m in self.uneven)

    @property
    def windowed(self) -> bool:
        """Whether recordings are cut into windows."""
        return any(to.step for to in self.targets.values())


def read_manifest(
    root: Path,
    manifest: Path | None = None,
    *,
    bad_samples: str = "error",
    encoders: Encoders | None = None,
    label_names: Sequence[str] = (),
) -> Dataset:
    """All samples of the folder ``root``.

    Bad samples (missing file, wrong shape, not finite, label out of range, line that is no JSON object, …) are all
    collected. ``bad_samples`` "error": DataError with the first 20 and their number; "skip": left out and kept in
    ``Dataset.skipped``, where windows with a gap always are; DataError when nothing is left. ``encoders``:
    the modalities to read, with kind and shape. ``manifest``: a file outside ``root``, of paths below it, whose first
    line may name that folder (``folder_of``); None: the folder's own.
    """
    own = root / MANIFEST
    path = manifest or own
    if path != own:
        pass
    elif path.exists() or path.is_symlink():
        regular_file_inside(root, path.name, ANY_SIZE)
    else:
        raise DataError(
            f"{path}: there is no such file",
            remedy='Write one JSON object a line, such as {"image": "001.png", "label": "cat"}.',
        )
    targets = {} if encoders is None else {m: target(e) for m, e in encoders.items()}
    folder = _Folder(
        root, targets, encoders is not None, f"{root.name or root}/{MANIFEST}" if path == own else path.name
    )
    names = tuple(label_names) or named_labels(root)
    rows: list[_Row] = []
    first: dict[str, int] = {}
    for line, text in manifest_lines(path):
        if not text:
            folder.problem(line, too_long())
            continue
        if line == 1 and _named_folder(text):
            continue
        if (row := _row(folder, line, text)) is not None:
            if first.setdefault(row.id, line) == line:
                rows += _samples(folder, row)
            else:
                folder.problem(line, f"id: {row.id!r} is already used on line {first[row.id]}")
    rows = _same_shapes(folder, rows)
    given = [row.label for row in rows]
    several = any(isinstance(label, list) for label in given) or classes_in(names) is not None
    numeric_names = levels_in(names) is not None
    numeric_labels = any(isinstance(label, float) for label in given)
    one = as_targets if (numeric_names if names else numeric_labels) else numbered
    number = as_sets if several else one
    labels, names, numeric, sets = number(given, names, lambda i, text: folder.problem(rows[i].line, text))
    good = [i for i, label in enumerate(labels) if label is not None]
    folder.problems.sort(key=lambda problem: int(problem.path.rpartition(":")[2]))
    decide(folder.problems, len(good), bad_samples, str(path))
    skipped = [*folder.problems, *folder.notes]
    kept = [rows[i] for i in good]
    data = _stack(kept, [label for label in labels if label is not None], names, skipped, str(path))
    sets = None if sets is None or data.labels is None else sets[good]
    recordings = np.array([row.recording for row in kept], dtype=np.str_) if folder.windowed else None
    numeric = None if numeric is None else numeric[good]
    return replace(data, resizable=folder.resizable, recordings=recordings, targets=numeric, sets=sets)


def folder_of(manifest: Path) -> Path:
    """Data folder of a manifest outside it, from its first line {"files": FOLDER}. Raises DataError."""
    regular_file(manifest, ANY_SIZE)
    with manifest.open("rb") as file:
        named = _named_folder(file.readline(MAX_LINE_BYTES))
    if not named:
        raise DataError(
            f"{manifest}: its first line does not name the folder of its files",
            remedy='Begin it with {"files": "/path/of/the/folder"}, or give a folder with manifest.jsonl.',
        )
    return manifest.parent / named


def names_folder(path: Path) -> bool:
    """True for a manifest outside its data folder: its first line names that folder."""
    with path.open("rb") as file:
        return bool(_named_folder(file.readline(MAX_LINE_BYTES)))


def _named_folder(line: bytes) -> str:
    """Data folder in a manifest's first line; "" for a sample's line."""
    try:
        return msgspec.json.decode(line, type=_Elsewhere).files
    except (ValueError, RecursionError):
        return ""


def too_long() -> str:
    """Fault of a line over MAX_LINE_BYTES."""
    return f"the line has more than {MAX_LINE_BYTES} bytes; store large values as files"


def manifest_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank; b"" for one over MAX_LINE_BYTES. Raises DataError."""
    with path.open("rb") as file:
        line = 0
        while text := file.readline(MAX_LINE_BYTES + 1):
            line += 1
            if line > MAX_SAMPLES:
                raise DataError(
                    f"{path}: more than {MAX_SAMPLES} lines", remedy="Split the data set over several devices."
                )
            if len(text) > MAX_LINE_BYTES:
                while text and not text.endswith(b"\n"):
                    text = file.readline(MAX_LINE_BYTES)
                yield line, b""
            elif text.strip():
                yield line, text


def _row(folder: _Folder, line: int, text: bytes) -> _Row | None:
    """The sample of one line, or None with its problems noted."""
    before = len(folder.problems)
    try:
        record = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        folder.problem(line, f"not a JSON object: {error}")
        return None
    label = record.get("label")
    each = label if isinstance(label, list) else [] if label is None else [label]
    kinds = (str, int) if isinstance(label, list) else (str, int, float)
    if any(isinstance(one, bool) or not isinstance(one, kinds) for one in each):
        folder.problem(line, f"label: {label!r:.60} is neither a name nor a number")
        each, label = [], None
    group = class_name(str(record.get("group", "")))
    row = _Row(line, str(record.get("id", f"line {line}")), group, cast("Label", label))
    if max(len(row.id), len(row.group), *(len(str(one)) for one in each), 0) > MAX_NAME:
        folder.problem(line, f"id, label and group may have {MAX_NAME} characters")
    given = {key: value for key, value in record.items() if key not in OWN_KEYS and value is not None}
    for key in given:
        try:
            _read_value(folder, row, key, given)
        except SampleError as error:
            folder.problem(line, f"{key}: {error.message}")
    if folder.bytes_read > MAX_DATASET_BYTES:
        raise DataError(
            f"{folder.name}:{line}: the samples so far take more than {MAX_DATASET_BYTES} bytes of memory",
            remedy="Split the data set over several devices, or make the samples smaller.",
        )
    if len(folder.problems) == before and not row.values and not row.windows:
        wanted = f" of {', '.join(folder.targets)}" if folder.closed else ""
        folder.problem(line, f"has no modality{wanted}")
    return row if len(folder.problems) == before else None


def _read_value(folder: _Folder, row: _Row, key: str, given: Mapping[str, object]) -> None:
    """Read one modality of a sample, if the model has it. Raises SampleError."""
    to = _target(folder, key, given[key], given)
    if to is None:
        return
    if to.step:
        row.windows[key] = read_samples(folder.root, given[key], to)
        folder.bytes_read += row.windows[key].values.nbytes  # as samples: views of the recording until then
    else:
        value = read(folder.root, given[key], to)
        if to.guessed and to.kind == "sensor" and np.isnan(value).any():
            folder.note(row.line, f"{key}: has gaps; it can be used where it is cut into windows")
            value = np.nan_to_num(value)
        row.values[key] = value
        folder.bytes_read += value.nbytes
    folder.targets[key] = to  # a guess holds from the first value that can be read


def _samples(folder: _Folder, row: _Row) -> list[_Row]:
    """The samples of one line: itself, or its windows; a window that touches a gap is missing, and counted."""
    count = least(row.windows)
    folder.samples += count
    if folder.samples > MAX_SAMPLES:
        raise DataError(
            f"{folder.name}:{row.line}: more than {MAX_SAMPLES} samples so far",
            remedy="Set model.encoders.<modality>.step to more, or split the data set over several devices.",
        )
    row.recording = row.id
    if not row.windows:
        return [row]
    for m, windows in row.windows.items():
        if lost := int((~windows.whole[:count]).sum()):
            folder.note(row.line, f"{m}: {lost} of {count} {GAP}")
    found = [
        _Row(row.line, f"{row.id}#{k}", row.group, row.label, values, recording=row.id)
        for k, values in joined(row.values, row.windows)
    ]
    if not found:
        folder.problem(row.line, f"none of the first {count} windows is without a gap")
    return found


def _target(folder: _Folder, key: str, value: object, given: Mapping[str, object]) -> Target | None:
    """How to read ``key``; None: not a modality of this model. A near miss of one is a problem, not an extra key."""
    if key in folder.targets:
        return folder.targets[key]
    if folder.closed:
        near = difflib.get_close_matches(key, [m for m in folder.targets if m not in given], n=1, cutoff=0.75)
        if near:
            raise SampleError(f"not a modality of this model; did you mean {near[0]!r}?")
        return None
    if not is_modality(key):
        raise SampleError(f"{key!r} cannot name a modality")
    return guess(value)


def _same_shapes(folder: _Folder, rows: list[_Row]) -> list[_Row]:
    """The rows of one shape for each modality: the most frequent where no encoder says it (of equals, the first).

    Of modalities whose files are read again when the model is known, values of other shapes become zeros of that one:
    only their number is of use until then. Grey pictures among coloured ones get three equal channels.
    """
    bad: set[int] = set()
    for modality, to in folder.targets.items():
        having = [row for row in rows if modality in row.values]
        if to.kind == "vision" and {row.values[modality].shape[2:] for row in having} == {(1,), (3,)}:
            for row in having:
                if row.values[modality].shape[2] == 1:
                    row.values[modality] = np.repeat(row.values[modality], 3, axis=2)
        counts = Counter((row.values[modality].shape, row.values[modality].dtype) for row in having)
        if len(counts) < 2:
            continue
        (shape, dtype), _ = counts.most_common(1)[0]
        resizable = modality in folder.resizable
        for row in having:
            value = row.values[modality]
            longer = to.guessed and to.kind == "sensor" and value.shape[1:] == shape[1:] and value.shape != shape
            if longer:
                folder.uneven.add(modality)
            if resizable or longer:
                row.values[modality] = value if value.shape == shape else np.zeros(shape, dtype)
            elif (value.shape, value.dtype) != (shape, dtype) and row.line not in bad:
                advice = _ADVICE.get(to.kind, "").format(f"model.encoders.{modality}")
                folder.problem(row.line, f"{modality}: has shape {list(value.shape)}, the others {list(shape)}{advice}")
                bad.add(row.line)
    return [row for row in rows if row.line not in bad]


def _stack(rows: list[_Row], labels: list[int], names: tuple[str, ...], skipped: list[Problem], where: str) -> Dataset:
    modalities: dict[str, Array] = {}
    present = {}
    room = 0
    for m in dict.fromkeys(m for row in rows for m in row.values):
        flags = np.array([m in row.values for row in rows], dtype=bool)
        example = next(row.values[m] for row in rows if m in row.values)
        room += len(rows) * example.nbytes  # rows without it take as much
        if room > MAX_DATASET_BYTES:
            raise DataError(
                f"{where}: {len(rows)} samples take {room} bytes of memory, where each of them has every modality, and "
                f"at most {MAX_DATASET_BYTES} are admitted",
                remedy="Split the data set over several devices, or make the samples smaller.",
            )
        values = np.zeros((len(rows), *example.shape), dtype=example.dtype)
        for i, row in enumerate(rows):
            if m in row.values:
                values[i] = row.values.pop(m)  # each value is freed as it is copied
        modalities[m], present[m] = values, flags
    groups = [row.group for row in rows]
    numbers = np.array(labels, dtype=np.int64)
    return Dataset(
        modalities=modalities,
        present=present,
        labels=numbers if (numbers >= 0).any() else None,
        label_names=names,
        ids=[row.id for row in rows],
        groups=np.array(groups, dtype=np.str_) if any(groups) else None,
        skipped=skipped,
    )
