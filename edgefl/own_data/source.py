"""The user's own data as a source of runs, with its manifests and facts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.data.folder import MANIFEST
from edgefl.data.label_sets import NONE, plain_names
from edgefl.data.recording import is_number
from edgefl.data.sources import MANIFEST_SUFFIX
from edgefl.data.values import pixel_fault
from edgefl.errors import DataError, StoreError
from edgefl.own_data.copies import leave_copies_out, say_shared
from edgefl.own_data.draft import Outline, recipe_for
from edgefl.own_data.facts import Facts, facts_of
from edgefl.own_data.given_manifest import from_manifest
from edgefl.own_data.npz import facts_of_arrays, read_arrays, write_arrays
from edgefl.own_data.samples import halves, understand
from edgefl.own_data.understood import Understood
from edgefl.own_data.wishes import MODALITY_KINDS, NO_ROLES, Roles
from edgefl.storage.disk import store_errors, write_new

SHOWN = 5  # classes and groups that are named


class Source(NamedTuple):
    """A data set as EdgeFL reads it. ``path``: folder with a manifest, or .npz; ``written``: files made for it."""

    path: Path
    facts: dict[str, Facts]
    outline: Outline
    said: list[str]
    unused: dict[str, str]
    test: Path | None = None
    written: tuple[Path, ...] = ()
    label: str = ""  # the column of a table that labels came from


def from_files(
    source: Path,
    template: str = "",
    roles: Roles = NO_ROLES,
    *,
    other_layout: Callable[[str], str] = lambda layout: layout,
    run_file: Path | None = None,
    force: bool = False,
    skip_bad: bool = False,
    made: str = "",
    test: Path | None = None,
) -> Source:
    """A folder or a table; each half of it gets a manifest. ``other_layout``: may give another than was guessed.

    A manifest that is there is taken instead of one made. ``made``: name of the folder for a table's samples; ``test``:
    folder or table of the test set, None: the folder's own half, if it has one.
    ``run_file``: beside it lie the manifests of a read-only source; None: such a source is an error.
    Raises DataError where nothing can be made of it, StoreError.
    """
    train, half = halves(source)
    given, named = not force and _has_manifest(train), test is not None
    if given and (template or roles != Roles(kinds=roles.kinds)):
        raise StoreError(
            f"{train / MANIFEST} is there already, and would be used as it is",
            remedy="To read the files by these options instead, move it away, or write over it by --force.",
        )
    found = from_manifest(train, roles, skip_bad=skip_bad) if given else understand(train, template, roles, made=made)
    if found.layout and not template:
        told = other_layout(found.layout)
        found = understand(train, told, roles) if told != found.layout else found
    _change_kinds(found, roles)
    if not given:
        leave_copies_out(found)
    _check_labels(source, found)
    test = test or half
    held, held_given = None, not force and (given or named) and test is not None and _has_manifest(test)
    if held_given and test is not None:
        held = from_manifest(test, roles, skip_bad=skip_bad)
    elif test is not None and (named or not given):
        held = understand(test, found.layout, roles._replace(label=roles.label or found.label_column))
    if half is not None:
        beside = (path.name for path in sorted(source.iterdir()) if path not in {train, half})
        found.unused |= {name: f"lies beside {train.name} and {half.name}" for name in beside if name[0] != "."}
    facts = {modality: facts_of(found, modality, skip_bad=skip_bad) for modality in sorted(found.kinds)}
    parts = [found] if held is None else [found, held]
    new = [part for part, there in zip(parts, (given, held_given), strict=False) if not there]
    written = _write_manifests([(part, _manifest_of(part, run_file)) for part in new], force=force)
    at = {id(part): part.root if path.parent == part.root else path for part, path in zip(new, written, strict=True)}
    places = [at.get(id(part), part.root) for part in parts]
    if held is not None:
        say_shared(found, held)
    said = list(found.said)
    if held is not None:
        said.append(f"{held.root.name} is the test set, of {len(held.samples)} samples")
    outline = Outline(len(found.samples), bool(found.labels), len(found.groups), found.several, found.numeric)
    return Source(
        places[0],
        facts,
        outline,
        [*_counted(found), *said],
        found.unused,
        places[1] if held is not None else None,
        written,
        found.label_column,
    )


def from_arrays(source: Path, roles: Roles = NO_ROLES) -> Source:
    """An .npz file; a copy with other names where they are not those that EdgeFL reads."""
    arrays = read_arrays(source)
    own = not (arrays.renamed or arrays.unused or arrays.test)
    path, test, written = source, None, []
    if not own:
        path = source.with_name(f"{source.stem}-edgefl.npz")
        write_arrays(arrays.train, path)
        written = [path]
    if arrays.test:
        test = source.with_name(f"{source.stem}-edgefl-test.npz")
        write_arrays(arrays.test, test)
        written.append(test)
    data = Dataset.load_npz(path)
    if data.targets is None and (counts := [n for n in data.class_counts() if n]) and len(counts) == 1:
        without = "" if data.labels is None else f" ({(data.labels < 0).sum()} are -1: no label)"
        raise DataError(
            f"{source}: all {counts[0]} labels are one class{without}: there is nothing to tell apart",
            remedy="Number classes from 0, or add samples of another class.",
        )
    rows = {name for name, array in arrays.train.items() if array.ndim == 2}
    facts = facts_of_arrays(data, rows, roles.kinds)
    _check_pixels(source, data, facts)
    said = _told(data) + [f"the array {old} is the {new}" for old, new in arrays.renamed.items()]
    if test is not None:
        said.append(f"the array of the split tells a test set of {len(next(iter(arrays.test.values())))} samples apart")
    return Source(path, facts, _outline(data), said, dict(arrays.unused), test, tuple(written))


def check_task(source: Path, recipe: str, data: Source) -> None:
    """Raise DataError where nothing can be learned."""
    if not (recipe or recipe_for(data.outline, len(data.facts))):
        raise DataError(
            f"{source}: one modality ({next(iter(data.facts))}) and no label: there is nothing to learn",
            remedy="Put the files into a folder a label, name a column of a table by --label, or say by "
            "--path where the label is.",
        )


def _change_kinds(found: Understood, roles: Roles) -> None:
    """The kinds of modalities as the user says. Raises DataError for one that reads other files."""
    for modality, kind in roles.kinds.items():
        if modality in found.kinds and kind != found.kinds[modality]:
            names = [str(sample.values[modality]) for sample in found.samples if modality in sample.values]
            if kind not in MODALITY_KINDS or not all(name.lower().endswith(".npy") for name in names):
                raise DataError(
                    f"--kind {modality}={kind}: {modality} is {found.kinds[modality]} by its files",
                    remedy="Store arrays as .npy, of which the kind cannot be seen; or leave this option out.",
                )
            found.kinds[modality] = kind


def _check_labels(source: Path, found: Understood) -> None:
    """Raise DataError where all labels are one: there is nothing to tell apart."""
    if len(found.labels) == 1 and not any(sample.label == NONE for sample in found.samples):
        ((name, count),) = found.labels.items()
        column = f" (column {found.label_column})" if found.label_column else ""
        raise DataError(
            f"{source}: all {count} labels{column} are {name!r:.60}: there is nothing to tell apart",
            remedy="Add samples of another class, or name another column by --label.",
        )


def _has_manifest(folder: Path) -> bool:
    return folder.is_dir() and (folder / MANIFEST).is_file()


def manifest_beside(run_file: Path, root: Path) -> Path:
    """Path beside a run file of the manifest of a read-only data folder ``root``."""
    name = root.resolve().name.removesuffix("-edgefl")
    return run_file.parent / f"{'-'.join(dict.fromkeys([run_file.stem, name]))}-edgefl{MANIFEST_SUFFIX}"


def _manifest_of(part: Understood, run_file: Path | None) -> Path:
    """Path of a part's manifest: in its folder, beside the run file for a read-only one."""
    there = part.root if part.root.exists() else part.root.parent
    if run_file is None or os.access(there, os.W_OK):
        return part.root / MANIFEST
    return manifest_beside(run_file, part.root)


def _write_manifests(parts: Sequence[tuple[Understood, Path]], *, force: bool) -> tuple[Path, ...]:
    """All or none. Raises StoreError where one is there, unless it may be written over."""
    paths = tuple(path for _, path in parts)
    if not force and (there := [path for path in paths if path.exists()]):
        raise StoreError(f"{there[0]} is there already", remedy="Move it away, or write over it by --force.")
    for part, path in parts:
        lines = [msgspec.json.encode(s.line(numeric=part.numeric, several=part.several)) for s in part.samples]
        if path.parent != part.root:
            lines.insert(0, msgspec.json.encode({"files": str(part.root.resolve())}))
        with store_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_new(path, b"".join(line + b"\n" for line in lines))
    return paths


def _counted(found: Understood) -> list[str]:
    """How many samples there are, by modality, label and group."""
    having = {m: sum(m in sample.values for sample in found.samples) for m in sorted(found.kinds)}
    count = len(found.samples)
    listed = ", ".join(
        f"{m} ({found.kinds[m]}{'' if have == count else f', {have} of them'})" for m, have in having.items()
    )
    told = [f"{count} samples of {listed}"]
    for noun, counts in (("label", found.labels), ("group", found.groups)):
        if counts and noun == "label" and found.numeric:
            numbers = [float(label) for label in counts if is_number(label)]
            told.append(f"{counts.total()} labels from {min(numbers):g} to {max(numbers):g}")
        elif counts:
            named = ", ".join(f"{name} {n}" for name, n in counts.most_common(SHOWN))
            more = f", … and {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
            told.append(f"{len(counts)} {noun}{'' if len(counts) == 1 else 's'}: {named}{more}")
    if found.several and (known := sum(bool(sample.label) for sample in found.samples)):
        told.append(f"a sample has {found.labels.total() / known:.1f} labels in the mean")
    if not found.labels:
        told.append("no labels were found")
    elif without := sum(not sample.label for sample in found.samples):
        told.append(f"{without} of the samples have no label")
    return told


def _outline(data: Dataset) -> Outline:
    groups = 0 if data.groups is None else len(set(data.groups.tolist()))
    return Outline(len(data), data.labels is not None, groups, data.sets is not None, data.targets is not None)


def _told(data: Dataset) -> list[str]:
    shapes = ", ".join(f"{m} {list(shape)}" for m, shape in data.signature().items())
    names = plain_names(data.label_names)
    return [
        f"{len(data)} samples of {shapes}",
        f"{len(names)} labels{'' if data.sets is None else ', several a sample'}: {', '.join(names[:SHOWN])}",
    ]


def _check_pixels(source: Path, data: Dataset, facts: Mapping[str, Facts]) -> None:
    """Raise DataError for pictures in another range than training and predictions take them."""
    for modality in (m for m, each in facts.items() if each.kind == "vision"):
        if fault := pixel_fault(np.asarray(data.modalities[modality])):
            raise DataError(
                f"{source}: {modality} holds {fault}, and pictures are bytes, or numbers in 0..1",
                remedy="Store bytes (uint8), or divide by the largest value that a pixel can have.",
            )
