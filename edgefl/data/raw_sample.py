"""One sample from raw files, as ``edgefl predict`` and ``edgefl serve`` take it: a picture, a sound, a table, a text.

raw_samples({"image": Path("cat.png"), "text": "a cat on a mat"}, encoders)

Where the model takes windows, a recording gives one sample a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgefl.data.arrays import Array
from edgefl.data.column_names import column_names, others
from edgefl.data.dataset import Dataset
from edgefl.data.encoders import Encoder, Encoders
from edgefl.data.readers import SampleError, read_samples, read_text, target
from edgefl.data.recording import GAP, Windows, joined, least
from edgefl.data.suffixes import PICTURES, SOUNDS
from edgefl.data.table_cells import without_values
from edgefl.errors import DataError, Problem

#: Ends of a single sample's file -> kinds of modality it may hold.
SAMPLES: dict[str, tuple[str, ...]] = {
    ".npy": ("sensor", "vision", "audio", "text"),
    ".csv": ("sensor",),
    **dict.fromkeys(PICTURES, ("vision",)),
    **dict.fromkeys(SOUNDS, ("audio",)),
    ".txt": ("text",),
}
#: Windows of one request: of a file of 64 MiB, with overlap; a server has several at once.
MAX_WINDOWS_BYTES = 256 * 2**20
#: For a recording that is longer, or shorter, than what a model was trained on.
_LENGTH = (
    "Cut it into pieces of the rows that the encoder takes, as for training; or train with model.encoders.<modality>."
    "window, by which recordings of any length are cut."
)


#: A modality's value: a file, a text as it is, a table's row by columns, or a list of numbers or rows of them.
Value = Path | str | Mapping[str, object] | list[object]


def raw_samples(files: Mapping[str, Value], encoders: Encoders) -> Dataset:
    """The one sample whose modalities are these files or values as they are; or its windows.

    Raises DataError.
    """
    unknown = [m for m in files if m not in encoders]
    if unknown or not files:
        what = f"no bundle takes {', '.join(unknown)}" if unknown else "a sample needs one modality at least"
        raise DataError(what, remedy=f"Choose from: {', '.join(encoders)}.")
    values: dict[str, Array] = {}
    windows: dict[str, Windows] = {}
    notes: list[str] = []
    lacking: set[str] = set()
    for m, value in files.items():
        cells, told, absent = _by_column(m, value, encoders[m])
        notes += told
        lacking |= absent
        try:
            found = _read(cells, encoders[m])
        except SampleError as error:
            raise _refused(value, [f"{m}: {error.message}"]) from None
        if encoders[m].step:
            windows[m] = found
        else:
            values[m] = found.values[0]
    name = "+".join(value.name if isinstance(value, Path) else m for m, value in files.items())
    data = _stacked(name, values, windows)
    return replace(data, notes=(*notes, *without_values(data, encoders, lacking)))


def _by_column(m: str, value: Value, encoder: Encoder) -> tuple[Value, list[str], set[str]]:
    """A table's row by the model's own names of columns, sentences on what it lacks or has beside them, and the names
    of what it lacks.
    """
    if not isinstance(value, Mapping) or not encoder.columns:
        return value, [], set()
    wanted = {column.name: None for column in encoder.columns}
    names = column_names(value, list(wanted))
    row = {names.renamed.get(name, name): cell for name, cell in value.items()}
    notes = names.notes("its cell is missing, as null is")
    notes += others([name for name in row if name not in wanted])
    absent = {name for name, cell in row.items() if cell is None}  # said to be missing
    return row, [f"{m}: {note}" for note in notes], {*names.lacking, *absent}


def _stacked(name: str, values: Mapping[str, Array], windows: Mapping[str, Windows]) -> Dataset:
    count = least(windows)
    size = count * sum(value.nbytes for value in values.values()) + sum(
        w.values[:count].nbytes for w in windows.values()
    )
    if size > MAX_WINDOWS_BYTES:
        raise DataError(
            f"{name}: its {count} windows take {size} bytes of memory, more than {MAX_WINDOWS_BYTES}",
            remedy="Split the recording into several files.",
        )
    samples = list(joined(values, windows))
    if not samples:
        raise DataError(f"{name}: no window is without a gap", remedy="Give a longer recording.")
    present = {m: np.array([m in one for _, one in samples]) for m in (*values, *windows)}
    example = {m: next(one[m] for _, one in samples if m in one) for m, has in present.items() if has.any()}
    arrays = {m: np.stack([one.get(m, np.zeros_like(like)) for _, one in samples]) for m, like in example.items()}
    lost = {m: least(windows) - int(present[m].sum()) for m in windows}
    return Dataset(
        arrays,
        {m: present[m] for m in arrays},
        None,
        (),
        [f"{name}#{k}" for k, _ in samples] if windows else [name],
        skipped=[Problem(name, f"{m}: {count} of {least(windows)} {GAP}") for m, count in lost.items() if count],
        recordings=np.array([name] * len(samples), dtype=np.str_) if windows else None,
    )


def modality_of_file(path: Path, encoders: Encoders) -> str:
    """The modality a file is a sample of: the only one it can be read as. Raises DataError."""
    kinds = _kinds(path)
    found: list[str] = []
    refused = [f"{m} is {encoder.kind}" for m, encoder in encoders.items() if encoder.kind not in kinds]
    for m, encoder in encoders.items():
        if encoder.kind in kinds:
            try:
                _read(path, encoder)
                found.append(m)
            except SampleError as error:
                refused.append(f"{m}: {error.message}")
    if not found:
        raise _refused(path, refused)
    if len(found) > 1:
        raise DataError(
            f"{path}: may be {' or '.join(found)}",
            remedy=f"Say which, for instance with --modality {found[0]}.",
        )
    return found[0]


def _kinds(path: Path) -> tuple[str, ...]:
    kinds = SAMPLES.get(path.suffix.lower())
    if kinds is None:
        raise DataError(
            f"{path}: cannot be read", remedy=f"Give .npz, a folder with manifest.jsonl, or {', '.join(SAMPLES)}."
        )
    if "text" in kinds and any(c.isspace() for c in path.name):
        raise DataError(f"{path}: the name has a blank, and would be read as a text itself", remedy="Rename the file.")
    return kinds


def _read(value: Value, encoder: Encoder) -> Windows:
    to = target(encoder)
    if isinstance(value, Mapping | list):
        if encoder.kind not in {"table", "sensor"}:
            raise SampleError(f"{'a list' if isinstance(value, list) else 'an object'} is no {encoder.kind} sample")
        return read_samples(Path(), value, to)
    if isinstance(value, str):
        if encoder.kind != "text":
            raise SampleError(f"a text is no {encoder.kind} sample")
        return Windows(read_text(value, to)[None], np.ones(1, np.bool_))
    if encoder.kind not in _kinds(value):
        raise SampleError(f"is {encoder.kind}, and {value.suffix} files hold {' or '.join(_kinds(value))}")
    return read_samples(value.parent, value.name, to)


def _refused(value: Value, reasons: list[str]) -> DataError:
    shaped = any(": has shape" in reason for reason in reasons)
    what = value if isinstance(value, Path) else "the text" if isinstance(value, str) else "the record"
    return DataError(
        f"{what}: is no sample of these bundles ({'; '.join(reasons)})",
        remedy=_LENGTH if shaped else "Give another file.",
    )
