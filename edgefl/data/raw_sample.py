"""One sample from raw files, as ``edgefl predict`` and ``edgefl serve`` take it: a picture, a sound, a table, a text.

raw_samples({"image": Path("cat.png"), "text": "a cat on a mat"}, encoders)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgefl.data.arrays import Array
from edgefl.data.dataset import Dataset, Encoder, Encoders
from edgefl.data.readers import SampleError, Target, read, read_text, target
from edgefl.errors import DataError

#: Ends of a single sample's file -> kinds of modality it may hold.
SAMPLES: dict[str, tuple[str, ...]] = {
    ".npy": ("sensor", "vision", "audio", "text"),
    ".csv": ("sensor",),
    ".png": ("vision",),
    ".jpg": ("vision",),
    ".jpeg": ("vision",),
    ".wav": ("audio",),
    ".txt": ("text",),
}
#: For a recording that is longer, or shorter, than what a model was trained on.
_WINDOWS = (
    "Cut it into pieces of the rows that the encoder takes, as for training: one file each, or all in an .npz with an "
    "array [pieces, rows, channels] a modality; each piece is a sample."
)


def raw_samples(files: Mapping[str, Path | str], encoders: Encoders) -> Dataset:
    """The one sample whose modalities are these files, or texts as they are (``str``). Raises DataError."""
    unknown = [m for m in files if m not in encoders]
    if unknown or not files:
        what = f"no bundle takes {', '.join(unknown)}" if unknown else "a sample needs one modality at least"
        raise DataError(what, remedy=f"Choose from: {', '.join(encoders)}.")
    found: dict[str, Array] = {}
    for m, value in files.items():
        encoder = encoders[m]
        try:
            found[m] = _value(value, encoder)
        except SampleError as error:
            raise _refused(value, [f"{m}: {error.message}"]) from None
    ids = "+".join(value.name if isinstance(value, Path) else m for m, value in files.items())
    return Dataset({m: a[None] for m, a in found.items()}, {m: np.ones(1, dtype=bool) for m in found}, None, (), [ids])


def modality_of_file(path: Path, encoders: Encoders) -> str:
    """The modality a file is a sample of: the only one it can be read as. Raises DataError."""
    kinds = _kinds(path)
    found: list[str] = []
    refused = [f"{m} is {encoder.kind}" for m, encoder in encoders.items() if encoder.kind not in kinds]
    for m, encoder in encoders.items():
        if encoder.kind in kinds:
            try:
                _value(path, encoder)
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
            f"{path}: can not be read", remedy=f"Give .npz, a folder with manifest.jsonl, or {', '.join(SAMPLES)}."
        )
    if "text" in kinds and any(c.isspace() for c in path.name):
        raise DataError(f"{path}: the name has a blank, and would be read as a text itself", remedy="Rename the file.")
    return kinds


def _value(value: Path | str, encoder: Encoder) -> Array:
    to: Target = target(encoder)
    if isinstance(value, str):
        if encoder.kind != "text":
            raise SampleError(f"a text is no {encoder.kind} sample")
        return read_text(value, to)
    if encoder.kind not in _kinds(value):
        raise SampleError(f"is {encoder.kind}, and {value.suffix} files hold {' or '.join(_kinds(value))}")
    return read(value.parent, value.name, to)


def _refused(value: Path | str, reasons: list[str]) -> DataError:
    shaped = any(": has shape" in reason for reason in reasons)
    return DataError(
        f"{value if isinstance(value, Path) else 'the text'}: is no sample of these bundles ({'; '.join(reasons)})",
        remedy=_WINDOWS if shaped else "Give another file.",
    )
