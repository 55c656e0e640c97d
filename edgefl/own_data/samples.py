"""A user's files as samples: a folder, a table or an .npz file, and what was understood of it, in words."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from edgefl.data.arrays import MAX_FILE_BYTES
from edgefl.data.folder import MAX_NAME, MAX_SAMPLES
from edgefl.data.recording import is_number
from edgefl.data.regular_files import regular_file_inside
from edgefl.errors import DataError
from edgefl.own_data.cut_tables import write_recordings
from edgefl.own_data.layout import KIND_OF, NAME_OF, Layout, guess, kind_of
from edgefl.own_data.tables import LOOKED_AT, MAX_TABLE_BYTES, SUFFIXES, Table, distinct, has_head, read_table
from edgefl.own_data.understood import Sample, Understood
from edgefl.records import is_modality

MANIFEST = "manifest.jsonl"
#: Folder of what is made of tables, beside the manifest.
MADE = "edgefl-recordings"
#: Names of folders that are the halves of a data set.
_TRAIN, _TEST = frozenset({"train", "training"}), frozenset({"test", "testing", "val", "valid", "validation"})


def understand(source: Path, template: str = "") -> Understood:
    """The samples of a folder or of one table. ``template``: the layout of its paths, "": guessed.

    Recordings in tables are written below ``MADE``. Raises DataError where nothing can be made of it, StoreError.
    """
    if source.is_dir():
        return _folder(source, template)
    if source.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{source}: files of this kind are not read",
            remedy=f"Give a folder, .npz, or {', '.join(sorted(SUFFIXES))}.",
        )
    root = source.parent
    table = read_table(source, lambda text: _inside(root, text))
    found = Understood(root)
    if table.what == "list":
        _add_list(found, table, {})
    else:
        found.root = source.with_name(f"{source.stem}-edgefl")
        _add_table(found, table)
    return _finished(found, source)


def halves(source: Path) -> tuple[Path, Path | None]:
    """A folder's training half and its test half, where its sub-folders are named so; else the folder and None."""
    if not source.is_dir():
        return source, None
    named = {path.name.lower(): path for path in source.iterdir() if path.is_dir()}
    train, test = sorted(named.keys() & _TRAIN), sorted(named.keys() & _TEST)
    if len(train) != 1 or not test:
        return source, None
    return named[train[0]], named[test[0]]


def _inside(root: Path, text: str) -> bool:
    if len(text) >= 1000 or Path(text).suffix.lower() not in KIND_OF or Path(text).is_absolute():
        return False
    try:
        return bool(regular_file_inside(root, text, MAX_FILE_BYTES))
    except DataError:
        return False


def _below(root: Path, above: Path, text: str) -> str:
    """The path below ``root`` of the file that a list in the folder ``above`` names; "": it is no part of the data."""
    place = next((place for place in (above, root) if _inside(place, text)), None)
    return "" if place is None else (place / text).resolve().relative_to(root.resolve()).as_posix()


def _folder(root: Path, template: str) -> Understood:
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
        _add_table(found, _read(root, path))
    for path in lists:
        _add_list(found, _read(root, path), by_file)
    if cut:
        found.said.append(f"{len(cut)} tables of time steps are cut into sensors: {', '.join(sorted(found.kinds))}")
    return _finished(found, root)


def _read(root: Path, path: str, most: int | None = None) -> Table:
    above = (root / path).parent
    return read_table(root / path, lambda text: _inside(above, text) or _inside(root, text), most)


def _cut_up(found: Understood, table: Table, sample: Sample, path: str) -> None:
    """Replace a table that is a recording of several sensors, or several recordings, by its pieces."""
    del sample.values[next(modality for modality, value in sample.values.items() if value == path)]
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
    for folder, names, entries in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name != MADE)
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
    """Add a sample for all files that differ in their modality only; the sample of each path."""
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
        modality = _modality_name(parts.modality) or NAME_OF[kind]
        if modality in sample.values:
            found.unused[path] = f"is a second {modality} of the sample {parts.key}"
            continue
        sample.values[modality] = path
        found.kinds.setdefault(modality, kind)
        by_file[path] = sample
    found.samples += samples.values()
    return by_file


def _modality_name(word: str) -> str:
    """The singular of a folder's name, such as image of images; "" where it can name no modality."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", word.lower()).strip("_-")
    name = name[:-1] if name.endswith("s") and not name.endswith(("ss", "us", "is")) and name != "press" else name
    return name if is_modality(name) else ""


def _text_names(table: Table) -> dict[str, str]:
    """Column of sentences -> the name of its modality."""
    return distinct({column: _modality_name(column) or NAME_OF["text"] for column in table.texts})


def _add_list(found: Understood, table: Table, by_file: Mapping[str, Sample]) -> None:
    """Labels, groups and texts of a table's rows, for samples there are or for new ones."""
    name, above = table.path.relative_to(found.root).as_posix(), table.path.parent
    texts = _text_names(table)
    for number, row in enumerate(table.rows, start=1):
        given = [row[column] for column in table.files if row.get(column)]
        relative = [path for text in given if (path := _below(found.root, above, text))]
        if len(relative) < max(1, len(given)):
            found.unused.setdefault(f"{name}:{number}", "names no file that is there, is read and lies in the folder")
        sample = next((by_file[path] for path in relative if path in by_file), None)
        if sample is None:
            if not relative:
                continue
            sample = Sample(Path(relative[0]).with_suffix("").as_posix()[-MAX_NAME:])
            found.samples.append(sample)
        for path in relative:
            kind = kind_of(Path(path).suffix)
            if path in sample.values.values():
                continue
            if NAME_OF[kind] in sample.values:
                found.unused[path] = f"is a second {NAME_OF[kind]} of the sample {sample.id}"
            else:
                sample.values[NAME_OF[kind]] = path
                found.kinds.setdefault(NAME_OF[kind], kind)
        for column, modality in texts.items():
            if row.get(column, "").strip():
                sample.values[modality] = row[column].strip()
                found.kinds.setdefault(modality, "text")
        sample.label = row.get(table.label, "")[:MAX_NAME] or sample.label
        sample.group = row.get(table.group, "")[:MAX_NAME] or sample.group
    told = {"label": table.label, "group": table.group, "text": ", ".join(table.texts)}
    columns = " and ".join(f"{role}s from the column {column}" for role, column in told.items() if column)
    found.said.append(f"{name} lists files" + (f", {columns}" if columns else ""))
    if table.unused:
        found.unused[name] = f"columns without use: {', '.join(table.unused)}"


def _add_table(found: Understood, table: Table) -> None:
    """Samples of a table whose rows are time steps, or samples themselves."""
    name = table.path.name
    if table.unused:
        found.unused[name] = f"columns without use: {', '.join(table.unused)}"
    if table.what == "recording":
        made = write_recordings(table, found.root, MADE)
        found.samples += [Sample(one.id, dict(one.files), one.label, one.group) for one in made]
        found.kinds |= {modality: "sensor" for one in made for modality in one.files}
        sensors = ", ".join(f"{sensor} ({len(columns)} channels)" for sensor, columns in table.sensors.items())
        found.said.append(f"the rows of {name} are time steps of {sensors}: {len(made)} recordings")
        return
    numbers = [column for columns in table.sensors.values() for column in columns]
    texts = _text_names(table)
    for number, row in enumerate(table.rows, start=1):
        sample = Sample(f"{table.path.stem}-{number}", {}, row.get(table.label, ""), row.get(table.group, ""))
        if numbers and all(_is_finite(row.get(column, "")) for column in numbers):
            sample.values["features"] = [float(row[column]) for column in numbers]
        sample.values |= {
            modality: row[column].strip() for column, modality in texts.items() if row.get(column, "").strip()
        }
        if sample.values:
            found.samples.append(sample)
        else:
            found.unused[f"{name}:{number}"] = "has cells that are empty or no finite number"
    found.kinds |= ({"features": "sensor"} if numbers else {}) | dict.fromkeys(texts.values(), "text")
    found.said.append(
        f"each row of {name} is a sample of {len(numbers)} numbers" + (f" and {', '.join(texts)}" if texts else "")
    )


def _is_finite(cell: str) -> bool:
    return is_number(cell) and math.isfinite(float(cell))


def _finished(found: Understood, source: Path) -> Understood:
    found.samples = [sample for sample in found.samples if sample.values]
    used = {modality for sample in found.samples for modality in sample.values}
    found.kinds = {modality: kind for modality, kind in found.kinds.items() if modality in used}
    if not found.samples:
        listed = "; ".join(f"{path}: {why}" for path, why in list(found.unused.items())[:5])
        raise DataError(
            f"{source}: no samples were found" + (f" ({listed})" if listed else ""),
            remedy=f"Readable are {', '.join(KIND_OF)}, tables ({', '.join(sorted(SUFFIXES))}) and .npz; or write "
            f"{MANIFEST} yourself (docs/data.md).",
        )
    _unique(found.samples)
    if found.layout not in {"", "{id}"}:
        found.said.append(f"paths are read as {found.layout}")
    return found


def _unique(samples: Iterable[Sample]) -> None:
    seen: dict[str, int] = defaultdict(int)
    for sample in samples:
        seen[sample.id] += 1
        if (count := seen[sample.id]) > 1:
            sample.id = f"{sample.id[: MAX_NAME - 8]}~{count}"
