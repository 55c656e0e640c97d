"""A user's files as samples: a folder, a table or an .npz file, and what was understood of it, in words."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from edgefl.data.arrays import MAX_FILE_BYTES
from edgefl.data.encoding import is_windows
from edgefl.data.folder import MANIFEST, MAX_NAME, MAX_SAMPLES
from edgefl.data.labels import class_name
from edgefl.data.regular_files import regular_file_inside
from edgefl.data.suffixes import KIND_OF
from edgefl.errors import DataError
from edgefl.own_data.cut_tables import write_recordings
from edgefl.own_data.layout import NAME_OF, Layout, guess, kind_of
from edgefl.own_data.several_labels import columns_in, joined, parts, separator_of
from edgefl.own_data.table_rows import LOOKED_AT, MAX_TABLE_BYTES
from edgefl.own_data.table_samples import MADE, add_list, add_table, inside_folder, modality_name
from edgefl.own_data.tables import SUFFIXES, Table, has_head, read_table
from edgefl.own_data.understood import Sample, Understood
from edgefl.own_data.wishes import NO_ROLES, Roles
from edgefl.records import TableColumn

#: Labels that are named.
_NAMED = 5
#: Folder of what macOS keeps of files beside them in a .zip.
_MACOS = "__MACOSX"
#: Suffixes of files whose encoding counts.
_TEXTS = frozenset({".txt", ".csv", ".tsv", ".jsonl"})
#: Names of folders that are the halves of a data set.
_TRAIN, _TEST = frozenset({"train", "training"}), frozenset({"test", "testing", "val", "valid", "validation"})


def understand(source: Path, template: str = "", roles: Roles = NO_ROLES, *, made: str = "") -> Understood:
    """The samples of a folder or of one table. ``template``: the layout of its paths, "": guessed.

    ``made``: name of the folder beside a table that its samples go into; "": by the table's. Recordings in tables are
    written below ``MADE``. Raises DataError where nothing can be made of it, StoreError.
    """
    if source.is_dir():
        return _folder(source, template, roles)
    if source.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{source}: files of this kind are not read",
            remedy=f"Give a folder, .npz, or {', '.join(sorted(SUFFIXES))}; a table of text may be renamed to .csv, "
            "whatever separates its cells, blanks too.",
        )
    root = source.parent
    table = read_table(source, lambda text: inside_folder(root, text), roles=roles)
    found = Understood(root)
    if table.what == "list":
        add_list(found, table, {})
    else:
        found.root = source.with_name(made or f"{source.stem}-edgefl")
        add_table(found, table, roles)
    _say_encodings(found, [source])
    return _finished(found, source, roles)


def files_alone(root: Path, suffixes: Collection[str]) -> Understood:
    """The samples of a folder's files with these suffixes; nothing is written, and tables of several are not cut."""
    found = Understood(root)
    files, tables = _files(root, found)
    paths = files + tables
    fitting = [path for path in paths if Path(path).suffix.lower() in suffixes]
    for path in (one for one in paths if one not in set(fitting)):
        found.unused[path] = "is a table: name it by itself" if path in tables else "is of a kind that no bundle takes"
    if fitting:
        _add_files(found, fitting, "")
        _unique(found.samples)
    return found


def halves(source: Path) -> tuple[Path, Path | None]:
    """A folder's training half and its test half, where its sub-folders are named so; else the folder and None."""
    if not source.is_dir():
        return source, None
    named = {path.name.lower(): path for path in source.iterdir() if path.is_dir()}
    train, test = sorted(named.keys() & _TRAIN), sorted(named.keys() & _TEST)
    if len(train) != 1 or not test:
        return source, None
    return named[train[0]], named[test[0]]


def _folder(root: Path, template: str, roles: Roles) -> Understood:
    found = Understood(root)
    files, tables = _files(root, found)
    lists, whole, cut = [], [], []
    for path in tables:
        table = _table_of(root, path)
        if table is None:
            files.append(path)
        elif table.what == "list":
            lists.append(path)
        elif table.what == "recording" and not (table.label and table.group):
            cut.append(path)  # the rest of what it is may stand in its path
        else:
            whole.append(path)
    by_file = _add_files(found, files + cut, template) if files or cut else {}
    for path in cut:
        if path in by_file:
            _cut_up(found, _read(root, path), by_file[path], path)
    for path in whole:
        add_table(found, _read(root, path, roles=_there(root, path, roles)), roles)
    for path in lists:
        add_list(found, _read(root, path, roles=_there(root, path, roles)), by_file)
    if cut:
        sensors = {m for sample in found.samples for m in sample.values if found.kinds[m] == "sensor"}
        found.said.append(f"{len(cut)} tables of time steps are cut into sensors: {', '.join(sorted(sensors))}")
    _say_encodings(found, (root / path for path in dict.fromkeys(files + tables)))
    return _finished(found, root, roles)


def _read(root: Path, path: str, most: int | None = None, roles: Roles = NO_ROLES) -> Table:
    above = (root / path).parent
    return read_table(root / path, lambda text: inside_folder(above, text) or inside_folder(root, text), most, roles)


def _there(root: Path, path: str, roles: Roles) -> Roles:
    """Of the roles those whose columns one table of several has."""
    has = set(_read(root, path, LOOKED_AT).columns) if roles.named else set()
    label = roles.label if roles.label in has or columns_in(roles.label, has) else ""
    group = roles.group if roles.group in has else ""
    return roles._replace(label=label, group=group, drop=roles.drop & has)


def _cut_up(found: Understood, table: Table, sample: Sample, path: str) -> None:
    """Replace a table that is a recording of several sensors, or several recordings, by its pieces."""
    del sample.values[next(modality for modality, value in sample.values.items() if value == path)]
    for sensor, columns in table.sensors.items():
        found.columns.setdefault(sensor, tuple(map(TableColumn, columns)))
    for number, one in enumerate(write_recordings(table, found.root, MADE)):
        label, group = sample.label or one.label, sample.group or one.group
        if number == 0:
            sample.values |= one.files
            sample.label, sample.group = label, group
        else:
            found.samples.append(Sample(one.id, dict(one.files), label, group))
        found.kinds |= dict.fromkeys(one.files, "sensor")


def _files(root: Path, found: Understood) -> tuple[list[str], list[str]]:
    """Relative paths of what readers take, and of what may be a table; the rest is noted as unused."""
    files, tables = [], []

    def closed(error: OSError) -> None:
        found.unused[Path(error.filename).relative_to(root).as_posix()] = f"cannot be opened: {error.strerror}"

    for folder, names, entries in os.walk(root, onerror=closed):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in {MADE, _MACOS})
        for name in names:
            if (Path(folder) / name).is_symlink():
                found.unused[(Path(folder) / name).relative_to(root).as_posix()] = "is a link to a folder"
        if not names and not any(not name.startswith(".") for name in entries) and Path(folder) != root:
            found.unused[Path(folder).relative_to(root).as_posix()] = "is an empty folder"
        for name in sorted(entries):
            path = (Path(folder) / name).relative_to(root).as_posix()
            suffix = Path(name).suffix.lower()
            if name.startswith(".") or path in {MANIFEST, "labels.json"}:
                continue
            if (plain := path.encode("utf-8", "replace").decode()) != path:
                found.unused[plain] = "its name is not UTF-8"
            elif suffix in SUFFIXES:
                tables.append(_regular(root, path, MAX_TABLE_BYTES))
            elif suffix in KIND_OF:
                files.append(_regular(root, path, MAX_FILE_BYTES))
            else:
                found.unused[path] = f"{suffix or 'no suffix'} is not read"
            if len(files) + len(tables) > MAX_SAMPLES:
                raise DataError(f"{root}: more than {MAX_SAMPLES} files", remedy="Split it over several devices.")
    return files, tables


def _regular(root: Path, path: str, limit: int) -> str:
    try:
        regular_file_inside(root, path, limit)
    except DataError as error:
        raise DataError(f"{root}: {error.message}", remedy=error.remedy) from None
    return path


def _table_of(root: Path, path: str) -> Table | None:
    """A table that is more than the channels of one sensor; None: a sensor's file, as its reader takes it."""
    full = root / path
    if full.suffix.lower() == ".csv" and not has_head(full):
        return None
    table = _read(root, path, LOOKED_AT)
    alone = table.what == "recording" and not (table.label or table.group or table.part) and len(table.sensors) == 1
    alone = alone and table.plain_time
    if full.suffix.lower() == ".csv" and (alone or (table.what == "features" and not table.label and not table.texts)):
        return None
    return table


def _add_files(found: Understood, paths: Sequence[str], template: str) -> dict[str, Sample]:
    """Add a sample for each group of files that differ only in modality; {path: its sample}."""
    depths = Counter(path.count("/") for path in paths)
    depth = template.count("/") if template else depths.most_common(1)[0][0]
    fitting = [path for path in paths if path.count("/") == depth]
    for path in set(paths) - set(fitting):
        found.unused[path] = f"lies {path.count('/')} folders deep, the others {depth}"
    if not fitting:
        raise DataError(
            f"{found.root}: no file lies {depth} folders deep, as {template!r} says", remedy="Correct the template."
        )
    layout = Layout(template) if template else guess(fitting)
    found.layout = layout.template
    by_file: dict[str, Sample] = {}
    samples: dict[str, Sample] = {}
    for path in fitting:
        full = Path(path)
        kind = kind_of(full.suffix)
        parts = layout.parts(path[: -len(full.suffix)])
        if parts is None:
            found.unused[path] = f"its name is not {layout.template}"
            continue
        sample = samples.setdefault(parts.key, Sample(parts.key[-MAX_NAME:], {}, parts.label, parts.group))
        modality = modality_name(parts.modality) or NAME_OF[kind]
        if modality in sample.values:
            found.unused[path] = f"is a second {modality} of the sample {parts.key}"
            continue
        sample.values[modality] = path
        found.kinds.setdefault(modality, kind)
        by_file[path] = sample
    found.samples += samples.values()
    return by_file


def _finished(found: Understood, source: Path, roles: Roles) -> Understood:
    if roles.task == "multilabel" and not found.several:  # of folders' names
        found.several, separator = True, separator_of([sample.label for sample in found.samples], asked=True)
        for sample in found.samples:
            sample.label = joined(parts(sample.label, separator)) if sample.label else ""
    found.samples = [sample for sample in found.samples if sample.values]
    for sample in found.samples:
        sample.label, sample.group = class_name(sample.label), class_name(sample.group)
    used = {modality for sample in found.samples for modality in sample.values}
    found.kinds = {modality: kind for modality, kind in found.kinds.items() if modality in used}
    found.columns = {modality: columns for modality, columns in found.columns.items() if modality in used}
    if not found.samples:
        listed = "; ".join(f"{path}: {why}" for path, why in list(found.unused.items())[:5])
        raise DataError(
            f"{source}: no samples were found" + (f" ({listed})" if listed else ""),
            remedy=f"Readable are {', '.join(KIND_OF)}, tables ({', '.join(sorted(SUFFIXES))}) and .npz; or write "
            f"{MANIFEST} yourself (docs/data.md).",
        )
    _unique(found.samples)
    _say_spellings(found)
    if found.layout not in {"", "{id}"}:
        found.said.append(f"paths are read as {found.layout}")
    return found


def _say_spellings(found: Understood) -> None:
    """Say which labels differ in nothing but capital letters, and blanks within."""
    spelt: dict[str, list[str]] = defaultdict(list)
    for label in found.labels:
        spelt["".join(label.casefold().split())].append(label)
    if alike := [", ".join(sorted(labels)) for labels in spelt.values() if len(labels) > 1]:
        more = f"; and {len(alike) - _NAMED} more" if len(alike) > _NAMED else ""
        listed = "; ".join(alike[:_NAMED]) + more
        found.said.append(f"labels that differ in capitals or blanks alone are classes of their own: {listed}")


def _say_encodings(found: Understood, paths: Iterable[Path]) -> None:
    """Say how many texts are neither UTF-8 nor UTF-16."""
    if count := sum(is_windows(path) for path in paths if path.suffix.lower() in _TEXTS):
        what = "1 file is" if count == 1 else f"{count} files are"
        found.said.append(f"{what} not in UTF-8, and read as Windows-1252 (Western European)")


def _unique(samples: Iterable[Sample]) -> None:
    seen: dict[str, int] = defaultdict(int)
    for sample in samples:
        seen[sample.id] += 1
        if (count := seen[sample.id]) > 1:
            sample.id = f"{sample.id[: MAX_NAME - 8]}~{count}"
