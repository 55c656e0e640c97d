"""Samples of a folder with a manifest: what ``init`` drafts a run file by, without writing one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgefl.data.folder import MANIFEST, OWN_KEYS
from edgefl.data.label_sets import SEPARATOR
from edgefl.data.labels import class_name
from edgefl.data.readers import SampleError, guess
from edgefl.errors import DataError
from edgefl.own_data.tables import Table, add_cell
from edgefl.own_data.understood import Sample, Understood


def from_manifest(folder: Path) -> Understood:
    """The samples of ``folder/manifest.jsonl``. Raises DataError naming a line that is no sample's."""
    found = Understood(folder, said=[f"{folder / MANIFEST} is used as it is"])
    with (folder / MANIFEST).open("rb") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                _add(found, number, text)
    if not found.samples:
        raise DataError(f"{folder / MANIFEST}: holds no samples", remedy="Write a JSON object a line (docs/data.md).")
    for modality in [m for m, kind in found.kinds.items() if kind == "table"]:
        _find_columns(found, modality)
    return found


def _add(found: Understood, number: int, text: bytes) -> None:
    try:
        record = msgspec.json.decode(text, type=dict[str, object])
        values = {key: value for key, value in record.items() if key not in OWN_KEYS and value is not None}
        for modality, value in values.items():
            found.kinds.setdefault(modality, guess(value).kind)
    except (ValueError, RecursionError, SampleError) as error:
        what = error.message if isinstance(error, SampleError) else str(error)
        raise DataError(f"{found.root / MANIFEST}:{number}: {what}", remedy="Mend that line (docs/data.md).") from None
    label = record.get("label")
    found.numeric |= isinstance(label, float)
    found.several |= isinstance(label, list)
    name = SEPARATOR.join(map(str, label)) if isinstance(label, list) else "" if label is None else str(label)
    group = class_name(str(record.get("group") or ""))
    found.samples.append(Sample(str(record.get("id", f"line {number}")), values, class_name(name), group))


def _find_columns(found: Understood, modality: str) -> None:
    """The columns of cells that are given by name."""
    cells = [value for sample in found.samples if isinstance(value := sample.values.get(modality), dict)]
    rows = [{str(name): str(value) for name, value in each.items() if value is not None} for each in cells]
    table = Table(found.root / MANIFEST, rows, list(dict.fromkeys(name for row in rows for name in row)))
    for column in table.columns:
        add_cell(table, column, [row[column] for row in rows if row.get(column)])
    found.columns[modality] = tuple(table.cells)
