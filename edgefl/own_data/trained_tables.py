"""A user's table as a model takes it that was trained on such a one: by the names of columns that its bundles hold."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from edgefl.data.column_names import ColumnNames, column_names
from edgefl.data.dataset import Dataset
from edgefl.data.folder import MANIFEST, MAX_NAME, names_folder, read_manifest
from edgefl.data.label_sets import SEPARATOR, classes_in
from edgefl.data.labels import class_name
from edgefl.data.levels import levels_in
from edgefl.data.recording import is_number
from edgefl.data.regular_files import regular_file
from edgefl.data.table_cells import without_values
from edgefl.errors import DataError, Problem
from edgefl.models.spec import EncoderSpec
from edgefl.own_data.cut_tables import write_recordings
from edgefl.own_data.several_labels import columns_in, joined, known_parts, merged
from edgefl.own_data.table_rows import MAX_TABLE_BYTES, read_rows
from edgefl.own_data.tables import SUFFIXES, Table, name_columns, spell_alike, untangle, widened
from edgefl.own_data.understood import Sample

Encoders = Mapping[str, EncoderSpec]


def takes_tables(path: Path, encoders: Encoders) -> bool:
    """Whether a file may be a table with the columns of a model, and is no manifest."""
    columns = any(encoder.columns for encoder in encoders.values())
    return columns and path.is_file() and path.suffix.lower() in SUFFIXES and not names_folder(path)


def read_trained(
    path: Path, encoders: Encoders, labels: Sequence[str], label_column: str, bad_samples: str = "error"
) -> Dataset:
    """The samples of a table: columns by name in any order, others not read, and the label where its column is there.

    A label that the model does not know is none, and is said in ``Dataset.skipped``; columns that are not there, or
    lack values, are in ``Dataset.notes``. Raises DataError.
    """
    regular_file(path, MAX_TABLE_BYTES)
    rows, units = read_rows(path)
    rows = widened(path, rows, list(rows[0])) or rows if rows else rows
    names, truth = _named_alike(rows, encoders, label_column)
    table = Table(path, rows, list(dict.fromkeys(name for row in rows[:100] for name in row)), units=units)
    if merges := columns_in(label_column, table.columns):
        table.columns = merged(table.rows, table.columns, merges)
    table.label = label_column if label_column in table.columns else ""
    _check_columns(table, encoders)
    with tempfile.TemporaryDirectory(prefix="edgefl-table-") as folder:
        recorded = {m: e for m, e in encoders.items() if e.kind == "sensor" and e.columns}
        root = Path(folder) if recorded else path.parent
        samples = _recordings(table, recorded, root) if recorded else _rows(table, encoders)
        data = read_known(samples, root, path, encoders, labels, bad_samples)
    inputs = names.notes("its cells are missing")
    notes = (*inputs, *truth.notes("no score"), *without_values(data, encoders, names.lacking))
    return replace(data, notes=notes)


def read_known(
    samples: Sequence[Sample], root: Path, source: Path, encoders: Encoders, labels: Sequence[str], bad_samples: str
) -> Dataset:
    """Samples of ``source``, with paths below ``root``, as a model takes them.

    Labels that it does not know are taken away, and said in ``Dataset.skipped``. Raises DataError.
    """
    levels, several = levels_in(labels) is not None, classes_in(labels)
    unknown = _without_unknown(samples, several or labels, levels=levels, several=several is not None)
    told = [sample.line(numeric=levels, several=several is not None) for sample in samples if sample.values]
    with tempfile.TemporaryDirectory(prefix="edgefl-known-") as folder:
        manifest = Path(folder) / MANIFEST
        manifest.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in told))
        try:
            data = read_manifest(
                root, bad_samples=bad_samples, encoders=encoders, label_names=labels, manifest=manifest
            )
        except DataError as error:
            raise DataError(error.message.replace(str(manifest), str(source)), remedy=error.remedy) from None
    return replace(data, skipped=[*data.skipped, *unknown])


def _named_alike(rows: list[dict[str, str]], encoders: Encoders, label_column: str) -> tuple[ColumnNames, ColumnNames]:
    """The model's columns, and those of the label, among the names of the rows, which get the model's names."""
    there = list(dict.fromkeys(name for row in rows[:100] for name in row))
    wanted = [column.name for encoder in encoders.values() for column in encoder.columns]
    labels = [label_column] if label_column in there else label_column.split(SEPARATOR) if label_column else []
    names = column_names([name for name in there if name not in labels], wanted)
    truth = column_names([name for name in there if name not in (*wanted, *names.renamed)], labels)
    if renamed := {**names.renamed, **truth.renamed}:
        rows[:] = [{renamed.get(name, name): cell for name, cell in row.items()} for row in rows]
    return names, truth


def _check_columns(table: Table, encoders: Encoders) -> None:
    """Raise DataError for a table without rows, or with no column of any modality."""
    wanted = [column.name for encoder in encoders.values() for column in encoder.columns]
    if not table.rows or not set(wanted) & set(table.columns):
        names = ", ".join(wanted[:10]) + (", …" if len(wanted) > 10 else "")
        raise DataError(
            f"{table.path}: has no column that the model knows; its columns: {', '.join(table.columns[:10]) or 'none'}",
            remedy=f"The model was trained on {names}: name the columns so.",
        )


def _rows(table: Table, encoders: Encoders) -> list[Sample]:
    """A sample a row."""
    samples = []
    for number, row in enumerate(table.rows, start=1):
        sample = Sample(f"{table.path.stem}-{number}"[-MAX_NAME:], {}, row.get(table.label, ""))
        for m, encoder in encoders.items():
            given = {column.name: row[column.name] for column in encoder.columns if row.get(column.name)}
            if given:
                sample.values[m] = given if encoder.kind == "table" else next(iter(given.values()))
        samples.append(sample)
    return samples


def _recordings(table: Table, encoders: Encoders, root: Path) -> list[Sample]:
    """A sample a recording, whose files are written below ``root``."""
    for m, encoder in encoders.items():
        columns = [column.name for column in encoder.columns]
        if set(columns) & set(table.columns):
            if absent := [name for name in columns if name not in table.columns]:
                raise DataError(
                    f"{table.path}: {m} lacks the channel {', '.join(absent)}",
                    remedy=f"Give all of its columns, {', '.join(columns)}, or none.",
                )
            table.sensors[m] = columns
    name_columns(table)
    spell_alike(table)
    if table.time:
        untangle(table)
    made = write_recordings(table, root, "recordings")
    return [Sample(one.id, dict(one.files), one.label, one.group) for one in made]


def _without_unknown(samples: Sequence[Sample], labels: Sequence[str], *, levels: bool, several: bool) -> list[Problem]:
    """Take away labels that the model does not know, and say which these are."""
    unknown: dict[str, int] = {}
    known = set(map(class_name, labels))
    for sample in samples:
        if several and sample.label:
            own, others = known_parts(sample.label, labels)
            sample.label = joined(own) if own or not others else ""
            for name in others:
                unknown[name] = unknown.get(name, 0) + 1
            continue
        sample.label = sample.label[:MAX_NAME]
        if sample.label and not (is_number(sample.label) if levels else class_name(sample.label) in known):
            unknown[sample.label] = unknown.get(sample.label, 0) + 1
            sample.label = ""
    return [Problem("label", f"{name!r:.60} of {n} rows is none the model knows") for name, n in unknown.items()][:20]
