"""One sample's value of one modality, from a file or inline, as the array its encoder takes.

| kind | accepted | result |
|---|---|---|
| sensor | .npy, .csv (rows are time steps; a head line may name a time column), inline list | [time, channels] |
| vision | pictures (on white, turned upright, resized), .npy (bytes, or 0..1) | [height, width, channels] in 0..1 |
| audio | sounds (log-mel), .npy | [frames, bands] |
| table | inline object of cells by column, or list of numbers | [columns, 2]: the value, and 1 where it is there |
| text | inline string, .txt, .npy of ids | [length] token ids, 0 = padding |

A string is a path relative to the data set's folder; for text it is the text itself unless it is one word that ends in
.txt or .npy. Paths can't leave the folder. A sensor's recording that is cut into windows gives several samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from edgefl.data.arrays import MAX_FILE_BYTES, Array, read_npy
from edgefl.data.encoders import Encoder, fits, shown
from edgefl.data.encoding import decoded
from edgefl.data.log_mel import log_mel
from edgefl.data.pictures import read_picture
from edgefl.data.recording import Recording, Windows, cut, read_csv, regular
from edgefl.data.regular_files import regular_file_inside
from edgefl.data.sounds import read_sound
from edgefl.data.suffixes import KIND_OF, PICTURES, SOUNDS
from edgefl.data.table_cells import cells_of
from edgefl.data.tokens import DEFAULT_LENGTH, DEFAULT_VOCABULARY, Tokenizer, tokenizer
from edgefl.data.values import as_values, pixel_fault
from edgefl.errors import DataError, MissingDependencyError
from edgefl.records import TableColumn
from edgefl.storage.checkpoint_paths import is_own

MAX_TEXT_BYTES = 2**20  # of one text; a model reads a few hundred words of it
DEFAULT_BANDS = 40  # as in av_digits
_NOT_FINITE = "holds values that are not finite (NaN or infinite)"
_GAPS = "has absent values in {} of {} time steps, and no window is cut around them"


class SampleError(DataError):
    """One sample's value can't be used; the others may."""


@dataclass(frozen=True)
class Target:
    """The kind and shape that a modality's values are converted to. ``vocabulary`` 0: not known.

    ``shape`` (): whatever the value gives; an axis of 0: as the value has it. ``step``, ``rate``, ``source_rate`` and
    ``crop`` as in ``edgefl.models.spec.EncoderSpec``. ``guessed``: from a value, while the model is not known yet.
    """

    kind: str
    shape: tuple[int, ...] = ()
    vocabulary: int = 0
    tokenize: Tokenizer | None = None
    step: int = 0
    rate: float = 0.0
    source_rate: float = 0.0
    crop: Literal["stretch", "center"] = "stretch"
    guessed: bool = False
    columns: tuple[TableColumn, ...] = ()


def target(encoder: Encoder) -> Target:
    """The target of an encoder. Raises DataError for an unknown kind, or a tokenizer that can't be had."""
    kind, shape = encoder.kind, tuple(encoder.input_shape)
    if kind not in KINDS:
        raise DataError(
            f"files are not read for an encoder of kind {kind!r}; valid: {', '.join(KINDS)}",
            remedy="Give its samples as arrays: .npz, or a data set by name.",
        )
    public = bool(encoder.pretrained) and not is_own(encoder.pretrained)
    if kind == "text":
        ids = encoder.vocabulary or (0 if public else DEFAULT_VOCABULARY)
        return Target(kind, shape, ids, tokenizer(ids, encoder.pretrained, encoder.arch, encoder.config))
    if kind == "sensor":
        return Target(kind, shape, step=encoder.step, rate=encoder.rate, source_rate=encoder.source_rate)
    if kind == "table":
        return Target(kind, shape, columns=encoder.columns)
    # A public audio checkpoint has a spectrogram of its own; ours would be a silent mismatch.
    return Target("features" if kind == "audio" and public else kind, shape, crop=encoder.crop)


def guess(value: object) -> Target:
    """A target for a modality without an encoder, from one of its values. Raises SampleError."""
    if isinstance(value, list):
        return Target("sensor", guessed=True)
    if isinstance(value, dict):
        return Target("table", guessed=True)
    if not isinstance(value, str):
        raise SampleError(f"a value has to be a path, a text or a list of rows, not {type(value).__name__}")
    kind = KIND_OF.get(_suffix(value), "text")
    if kind == "text":
        return Target(kind, vocabulary=DEFAULT_VOCABULARY, tokenize=tokenizer(), guessed=True)
    return Target(kind, guessed=True)


def read(root: Path, value: object, to: Target) -> Array:
    """The array of one value; ``root`` is the data set's folder. Raises SampleError when this value can't be used."""
    with _naming(value):
        array = READERS[to.kind](root, value, to)
    _check_shape(array.shape, to)
    if array.size == 0:
        raise SampleError(f"is empty (shape {list(array.shape)})")
    tolerated = to.guessed and to.kind == "sensor"  # gaps, which the model may have cut around
    if array.dtype.kind == "f" and not (np.isfinite(array) | (np.isnan(array) & tolerated)).all():
        absent = np.isnan(array).any(axis=-1)
        gaps = to.kind == "sensor" and absent.any() and not np.isinf(array).any()
        raise SampleError(_named(value, _GAPS.format(absent.sum(), len(array)) if gaps else _NOT_FINITE))
    return array


def read_samples(root: Path, value: object, to: Target) -> Windows:
    """The samples of one value: itself, or the windows of a recording where ``to`` has a step. Raises SampleError."""
    if not to.step:
        return Windows(read(root, value, to)[None], np.ones(1, np.bool_))
    with _naming(value):
        rows, cuts = _recording(root, value, to)
        found = cut(rows, cuts, to.shape[0], to.step)
    _check_shape(found.values.shape[1:], to)
    if np.isinf(rows).any():
        raise SampleError(_named(value, _NOT_FINITE))
    if not found.whole.any():
        raise SampleError(_named(value, f"has no window of {to.shape[0]} time steps without a gap"))
    return found


@contextmanager
def _naming(value: object) -> Iterator[None]:
    """Faults of a value as SampleError, with the value's name."""
    try:
        yield
    except (MissingDependencyError, SampleError):
        raise
    except DataError as error:
        raise SampleError(_named(value, error.message)) from None


def _named(value: object, fault: str) -> str:
    return f"{value}: {fault}" if isinstance(value, str) and len(value) < 200 else fault


def _check_shape(shape: tuple[int, ...], to: Target) -> None:
    if not fits(shape, to.shape):
        raise SampleError(f"has shape {list(shape)}, the encoder takes {shown(to.shape)}")


def _suffix(value: str) -> str:
    return "" if any(c.isspace() for c in value) else Path(value[-8:]).suffix.lower()


def inside(root: Path, name: object, limit: int = MAX_FILE_BYTES) -> Path:
    """The regular file ``name`` in ``root``. Raises SampleError (outside, missing, more than ``limit`` bytes)."""
    if not isinstance(name, str):
        raise SampleError(f"a path is expected, not {type(name).__name__}")
    try:
        return regular_file_inside(root, name, limit)
    except DataError as error:
        raise SampleError(error.message) from None


def _open(root: Path, value: object, kind: str, *valid: str) -> tuple[Path, str]:
    path = inside(root, value)
    suffix = path.suffix.lower()
    if suffix not in valid:
        raise SampleError(f"{value}: {kind} values are read from {', '.join(valid)}")
    return path, suffix


def _sensor(root: Path, value: object, to: Target) -> Array:
    return _recording(root, value, to)[0]


def _recording(root: Path, value: object, to: Target) -> tuple[Array, Array]:
    """Sensor recording at the target's sampling rate, and its gaps.

    ``value``: a .npy or .csv path below ``root``, or a list of rows. Gives rows [T, C] float32, and flags [T]: True for
    the first row after a gap. Raises SampleError for anything else, DataError as ``regular``.
    """
    if isinstance(value, dict):
        raise SampleError("is an object; a sensor's rows are a list")
    found = Recording(_listed(value)) if isinstance(value, list) else None
    if found is None:
        path, suffix = _open(root, value, "sensor", ".npy", ".csv")
        found = read_csv(path) if suffix == ".csv" else Recording(read_npy(path))
    rows = found.rows[:, None] if found.rows.ndim == 1 else found.rows
    if rows.ndim != 2:
        raise SampleError(f"has {rows.ndim} axes; [time, channels] is expected")
    if rows.dtype.kind not in "fiub":
        raise SampleError(f"values of type {rows.dtype} are not numbers")
    return regular(found._replace(rows=rows), to.rate, to.source_rate)


def _table(root: Path, value: object, to: Target) -> Array:
    return cells_of(value, to.columns, to.shape[0] if to.shape else 0)


def _listed(value: list[object]) -> Array:
    # Among texts numpy gives each the room of the longest: a line of 1 MiB could ask for a hundred GiB.
    for cell in (cell for row in value for cell in (row if isinstance(row, list) else (row,))):
        if isinstance(cell, list):
            raise SampleError("has 3 axes or more; [time, channels] is expected")
        if not isinstance(cell, int | float):
            raise SampleError(f"values of type {type(cell).__name__} are not numbers")
    try:
        return np.asarray(value)
    except (ValueError, OverflowError):
        raise SampleError("its rows differ in length") from None


def _vision(root: Path, value: object, to: Target) -> Array:
    path, suffix = _open(root, value, "vision", *PICTURES, ".npy")
    if suffix != ".npy":
        return read_picture(path, to.shape, to.crop)
    array = as_values(read_npy(path), "vision")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3:
        raise SampleError(f"has {array.ndim} axes; [height, width, channels] is expected")
    if fault := pixel_fault(array):
        raise SampleError(f"{fault}; store bytes, or numbers in 0..1")
    return array


def _audio(root: Path, value: object, to: Target) -> Array:
    path, suffix = _open(root, value, "audio", *SOUNDS, ".npy")
    if suffix != ".npy" and to.kind == "features":
        raise DataError(
            "a pretrained audio encoder has its own spectrogram; store what its feature extractor gives as .npy"
        )
    if suffix != ".npy":
        samples, rate = read_sound(path)
        frames, bands = to.shape if len(to.shape) == 2 else (0, 0)
        return log_mel(samples, rate, bands or DEFAULT_BANDS, frames or None)
    array = as_values(read_npy(path), "audio")
    if array.ndim != 2:
        raise SampleError(f"has {array.ndim} axes; [frames, bands] is expected")
    return array


def _text(root: Path, value: object, to: Target) -> Array:
    if not isinstance(value, str):
        raise SampleError(f"a text is expected, not {type(value).__name__}")
    length = to.shape[0] if to.shape else DEFAULT_LENGTH
    suffix = _suffix(value)
    if suffix == ".txt" and not (text := decoded(inside(root, value, MAX_TEXT_BYTES).read_bytes())).strip():
        raise DataError("the text is empty")
    if suffix != ".npy":
        return read_text(text if suffix == ".txt" else value, to)
    ids = as_values(read_npy(inside(root, value)), "text")
    if ids.ndim != 1 or not 0 < len(ids) <= length:
        raise SampleError(f"has shape {list(ids.shape)}; at most {length} token ids are expected")
    if ids.min() < 0 or (to.vocabulary and ids.max() >= to.vocabulary):
        top = to.vocabulary - 1 if to.vocabulary else "…"
        raise SampleError(f"token ids from {ids.min()} to {ids.max()}; valid: 0 to {top}")
    return np.asarray(np.pad(ids, (0, length - len(ids))))


def read_text(text: str, to: Target) -> Array:
    """[length] token ids of a text as it is. Raises SampleError for an empty one."""
    if not text.strip():
        raise SampleError("the text is empty")
    tokenize = to.tokenize or tokenizer(to.vocabulary)
    return tokenize(text, to.shape[0] if to.shape else DEFAULT_LENGTH)


#: kind -> reader(folder, value, target). ``features``: audio for a pretrained encoder.
READERS: dict[str, Callable[[Path, object, Target], Array]] = {
    "sensor": _sensor,
    "vision": _vision,
    "audio": _audio,
    "text": _text,
    "table": _table,
    "features": _audio,
}
KINDS = ("sensor", "vision", "audio", "text", "table")
