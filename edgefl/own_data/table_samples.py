"""Samples of a user's table: a row a sample, a stretch of rows a sample, or what a list of files says of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgefl.data.arrays import MAX_FILE_BYTES
from edgefl.data.folder import MAX_NAME
from edgefl.data.recording import is_number
from edgefl.data.regular_files import regular_file_inside
from edgefl.data.suffixes import KIND_OF
from edgefl.errors import DataError
from edgefl.own_data.cut_tables import write_recordings
from edgefl.own_data.layout import NAME_OF, kind_of
from edgefl.own_data.tables import Table, distinct
from edgefl.own_data.understood import Sample, Understood
from edgefl.own_data.wishes import NO_ROLES, Roles
from edgefl.records import TableColumn, is_modality

#: Folder of what is made of tables, beside the manifest.
MADE = "edgefl-recordings"
#: The modality of a table's numbers, categories and dates.
FEATURES = "features"
#: Columns that are named beside a guess of the label.
_OTHERS = 40


def inside_folder(root: Path, text: str) -> bool:
    if len(text) >= 1000 or Path(text).suffix.lower() not in KIND_OF or Path(text).is_absolute():
        return False
    try:
        return bool(regular_file_inside(root, text, MAX_FILE_BYTES))
    except DataError:
        return False


def _below(root: Path, above: Path, text: str) -> str:
    """The path below ``root`` of the file that a list in the folder ``above`` names; "": it is no part of the data."""
    place = next((place for place in (above, root) if inside_folder(place, text)), None)
    return "" if place is None else (place / text).resolve().relative_to(root.resolve()).as_posix()


def modality_name(word: str) -> str:
    """The singular of a folder's name, such as image of images; "" where it can name no modality."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", word.lower()).strip("_-")
    name = name[:-1] if name.endswith("s") and not name.endswith(("ss", "us", "is")) and name != "press" else name
    return name if is_modality(name) else ""


def _text_names(table: Table) -> dict[str, str]:
    """Column of sentences -> the name of its modality."""
    return distinct({column: modality_name(column) or NAME_OF["text"] for column in table.texts})


def add_list(found: Understood, table: Table, by_file: Mapping[str, Sample]) -> None:
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
        for path, text in zip(relative, given, strict=False):
            kind = kind_of(Path(path).suffix)
            if path in sample.values.values():
                continue
            if NAME_OF[kind] in sample.values:
                found.unused[path] = f"is a second {NAME_OF[kind]} of the sample {sample.id}"
            else:
                sample.values[NAME_OF[kind]] = path
                found.kinds.setdefault(NAME_OF[kind], kind)
                found.columns.setdefault(
                    NAME_OF[kind], tuple(TableColumn(c, "file") for c in table.files if row.get(c) == text)
                )
        for column, modality in texts.items():
            if row.get(column, "").strip():
                sample.values[modality] = row[column].strip()
                found.kinds.setdefault(modality, "text")
        sample.label = row.get(table.label, "")[: None if table.guess.several else MAX_NAME] or sample.label
        sample.group = row.get(table.group, "")[:MAX_NAME] or sample.group
    _note_label(found, table)
    found.columns |= {modality: (TableColumn(column, "text"),) for column, modality in texts.items()}
    told = {"label": table.label, "group": table.group, "text": ", ".join(table.texts)}
    columns = " and ".join(f"{role}s from the column {column}" for role, column in told.items() if column)
    found.said += [f"{name} lists files" + (f", {columns}" if columns else ""), *table.said]
    note_unused(found, name, table)


def add_table(found: Understood, table: Table, roles: Roles = NO_ROLES) -> None:
    """Samples of a table whose rows are time steps, or samples themselves."""
    name = table.path.name
    note_unused(found, name, table)
    if table.what == "recording":
        found.columns |= {m: tuple(map(TableColumn, columns)) for m, columns in table.sensors.items()}
        made = write_recordings(table, found.root, MADE)
        found.samples += [Sample(one.id, dict(one.files), one.label, one.group) for one in made]
        found.kinds |= {modality: "sensor" for one in made for modality in one.files}
        sensors = ", ".join(f"{sensor} ({len(columns)} channels)" for sensor, columns in table.sensors.items())
        found.said.append(f"the rows of {name} are time steps of {sensors}: {len(made)} recordings")
        _note_label(found, table)
        return
    texts = _text_names(table)
    cells, kind = table.cells, roles.kinds.get(FEATURES, "table")
    for number, row in enumerate(table.rows, start=1):
        sample = Sample(f"{table.path.stem}-{number}", {}, row.get(table.label, ""), row.get(table.group, ""))
        features = {cell.name: value for cell in cells if (value := _cell(row.get(cell.name, ""), cell)) is not None}
        if kind == "sensor" and len(features) == len(cells) > 0:  # a signal has no gap
            sample.values[FEATURES] = list(features.values())
        elif kind == "table" and features:
            sample.values[FEATURES] = features
        sample.values |= {
            modality: row[column].strip() for column, modality in texts.items() if row.get(column, "").strip()
        }
        if sample.values:
            found.samples.append(sample)
        else:
            found.unused[f"{name}:{number}"] = "has cells that are empty or no finite number"
    for cell in (cell for cell in cells if cell.kind == "number"):
        if other := [text for row in table.rows if (text := row.get(cell.name, "")) and not is_number(text)]:
            found.said.append(
                f"{len(other)} cells of {cell.name} are no numbers, such as {other[0]!r:.30}: taken as empty"
            )
    found.kinds |= ({FEATURES: kind} if cells else {}) | dict.fromkeys(texts.values(), "text")
    found.columns |= {FEATURES: tuple(cells)} if cells and kind == "table" else {}
    found.columns |= {modality: (TableColumn(column, "text"),) for column, modality in texts.items()}
    found.said.append(
        f"each row of {name} is a sample of {_in_words(cells)}" + (f" and {', '.join(texts)}" if texts else "")
    )
    found.said += table.said
    _note_label(found, table)


def _cell(text: str, column: TableColumn) -> object:
    """The value of a cell for a manifest; None: there is none that can be used."""
    if column.kind != "number":
        return text or None
    return float(text) if is_number(text) and math.isfinite(float(text)) else None


def _in_words(cells: Sequence[TableColumn]) -> str:
    counts = Counter(str(cell.kind) for cell in cells)
    nouns = {"number": "numbers", "category": "categories", "date": "dates"}
    counted = [f"{counts[kind]} {noun if counts[kind] > 1 else kind}" for kind, noun in nouns.items() if counts[kind]]
    return " and ".join(filter(None, (", ".join(counted[:-1]), *counted[-1:]))) or "0 numbers"


def note_unused(found: Understood, name: str, table: Table) -> None:
    """Name the columns that are left out, with the reason that several of them may have."""
    for why in dict.fromkeys(table.unused.values()):
        columns = [column for column, reason in table.unused.items() if reason == why]
        found.unused[f"{name}: {', '.join(columns)}"] = why


def _note_label(found: Understood, table: Table) -> None:
    """Say which column is the label, whether that is a guess, and what else it could be."""
    guess = table.guess
    if not guess.column:
        return
    found.label_column, found.numeric, found.several = guess.column, guess.numeric, guess.several
    more = f" and {len(guess.others) - _OTHERS} more" if len(guess.others) > _OTHERS else ""
    others = f"; others possible: {', '.join(guess.others[:_OTHERS])}{more}" if guess.others else ""
    what = "label, a number to be predicted" if guess.numeric else "label"
    if guess.several:
        what = f"labels, several a row between {guess.separator!r}" if guess.separator else "labels, several a row"
    if guess.said and not (others or guess.numeric or guess.separator):
        found.said.append(f"{what}: {guess.column}")
    else:
        sure = "" if guess.said else f"a guess: {guess.why}"
        way = "as one label by --task classes; " if guess.separator else ""
        inner = "; ".join(filter(None, (sure, others.removeprefix("; "), f"{way}choose with --label")))
        found.said.append(f"{what}: {guess.column} ({inner})")
