"""Samples of a folder with a manifest, for a run file to be drafted."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgefl.data.folder import MANIFEST, OWN_KEYS, manifest_lines, too_long
from edgefl.data.labels import class_name
from edgefl.data.readers import SampleError, guess
from edgefl.data.regular_files import ANY_SIZE, regular_file_inside
from edgefl.errors import DataError
from edgefl.own_data.several_labels import joined
from edgefl.own_data.table_samples import note_unused
from edgefl.own_data.tables import Table, add_cell
from edgefl.own_data.understood import Sample, Understood
from edgefl.own_data.wishes import NO_ROLES, Roles
from edgefl.records import is_modality


def from_manifest(folder: Path, roles: Roles = NO_ROLES, *, skip_bad: bool = False) -> Understood:
    """Samples of ``folder/manifest.jsonl``; with ``skip_bad`` without the lines of none.

    ``roles``: of their ``kinds`` those of columns of cells are used. Raises DataError naming a line.
    """
    regular_file_inside(folder, MANIFEST, ANY_SIZE)
    samples = Understood(folder, said=[f"{folder / MANIFEST} is used as it is"])
    for number, line in manifest_lines(folder / MANIFEST):
        try:
            _add(samples, number, line)
        except DataError as error:
            where = f"{MANIFEST}:{number}"
            if not skip_bad:
                way = "Mend that line (docs/data.md), or leave such lines out by --skip-bad."
                raise DataError(f"{folder}/{where}: {error.message}", remedy=way) from None
            samples.unused[where] = error.message
    if not samples.samples:
        raise DataError(f"{folder / MANIFEST}: holds no samples", remedy="Write a JSON object a line (docs/data.md).")
    for modality in [m for m, kind in samples.kinds.items() if kind == "table"]:
        _find_columns(samples, modality, roles)
    return samples


def _add(samples: Understood, number: int, line: bytes) -> None:
    """The sample of one line. Raises DataError."""
    if not line:
        raise SampleError(too_long())
    try:
        record = msgspec.json.decode(line, type=dict[str, object])
    except (ValueError, RecursionError) as error:
        raise SampleError(f"not a JSON object: {error}") from None
    values = {key: value for key, value in record.items() if key not in OWN_KEYS and value is not None}
    if bad := [key for key in values if not is_modality(key)]:
        raise SampleError(f"{bad[0]!r} cannot name a modality")
    kinds = {modality: guess(value).kind for modality, value in values.items()}
    label, group = record.get("label"), record.get("group")
    samples.kinds = kinds | samples.kinds
    samples.numeric |= isinstance(label, float)
    samples.several |= isinstance(label, list)
    name = joined([str(each) for each in label]) if isinstance(label, list) else "" if label is None else str(label)
    group_name = "" if group is None else class_name(str(group))
    samples.samples.append(Sample(str(record.get("id", f"line {number}")), values, class_name(name), group_name))


def _find_columns(samples: Understood, modality: str, roles: Roles) -> None:
    """Columns of cells by name."""
    cells = [value for sample in samples.samples if isinstance(value := sample.values.get(modality), dict)]
    rows = [{str(name): str(value) for name, value in each.items() if value is not None} for each in cells]
    table = Table(samples.root / MANIFEST, rows, list(dict.fromkeys(str(name) for each in cells for name in each)))
    for column in table.columns:
        if values := [row[column] for row in rows if row.get(column)]:
            add_cell(table, column, values, roles.kinds.get(column, ""))
        else:
            table.unused[column] = "is empty"
    samples.columns[modality] = tuple(table.cells)
    note_unused(samples, modality, table)
