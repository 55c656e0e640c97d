"""One sample's value of one modality, from a file or inline, as the array its encoder takes.

| kind | accepted | result |
|---|---|---|
| sensor | .npy, .csv (one row a time step, an optional head line), inline list of rows | [time, channels] |
| vision | .png, .jpg (on white, turned upright, resized), .npy (bytes, or 0..1) | [height, width, channels] in 0..1 |
| audio | .wav (log-mel), .npy | [frames, bands] |
| text | inline string, .txt, .npy of ids | [length] token ids, 0 = padding |

A string is a path relative to the data set's folder; for text it is the text itself unless it is one word that ends in
.txt or .npy. Paths can't leave the folder.
"""

from __future__ import annotations

import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.data.arrays import MAX_FILE_BYTES, Array, read_npy
from edgefl.data.dataset import Encoder, as_values, fits, shown
from edgefl.data.log_mel import log_mel, read_wav
from edgefl.data.tokens import DEFAULT_LENGTH, DEFAULT_VOCABULARY, Tokenizer, tokenizer
from edgefl.errors import DataError, MissingDependencyError
from edgefl.storage.checkpoint_paths import is_own

MAX_TEXT_BYTES = 2**20  # of one text; a model reads a few hundred words of it
MAX_LINE_BYTES = 2**20  # of a .csv: a row of some 100,000 numbers
MAX_PIXELS = 50_000_000  # beyond the largest phone cameras; 150 MB decoded
DEFAULT_BANDS = 40  # as in av_digits

_SUFFIXES = {
    ".npy": "sensor",
    ".csv": "sensor",
    ".png": "vision",
    ".jpg": "vision",
    ".jpeg": "vision",
    ".wav": "audio",
    ".txt": "text",
}


class SampleError(DataError):
    """One sample's value can't be used; the others may."""


@dataclass(frozen=True)
class Target:
    """The kind and shape that a modality's values are converted to. ``vocabulary`` 0: not known.

    ``shape`` (): whatever the value gives; an axis of 0: as the value has it.
    """

    kind: str
    shape: tuple[int, ...] = ()
    vocabulary: int = 0
    tokenize: Tokenizer | None = None


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
        return Target(kind, shape, ids, tokenizer(ids, encoder.pretrained))
    # A public audio checkpoint has a spectrogram of its own; ours would be a silent mismatch.
    return Target("features" if kind == "audio" and public else kind, shape)


def guess(value: object) -> Target:
    """A target for a modality without an encoder, from one of its values. Raises SampleError."""
    if isinstance(value, list):
        return Target("sensor")
    if not isinstance(value, str):
        raise SampleError(f"a value has to be a path, a text or a list of rows, not {type(value).__name__}")
    kind = _SUFFIXES.get(_suffix(value), "text")
    return Target(kind, vocabulary=DEFAULT_VOCABULARY, tokenize=tokenizer()) if kind == "text" else Target(kind)


def read(root: Path, value: object, to: Target) -> Array:
    """The array of one value; ``root`` is the data set's folder. Raises SampleError when this value can't be used."""
    try:
        array = READERS[to.kind](root, value, to)
    except (MissingDependencyError, SampleError):
        raise
    except DataError as error:
        name = f"{value}: " if isinstance(value, str) and len(value) < 200 else ""
        raise SampleError(f"{name}{error.message}") from None
    if not fits(array.shape, to.shape):
        raise SampleError(f"has shape {list(array.shape)}, the encoder takes {shown(to.shape)}")
    if array.size == 0:
        raise SampleError(f"is empty (shape {list(array.shape)})")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise SampleError("holds values that are not finite (NaN or infinite)")
    return array


def _suffix(value: str) -> str:
    return "" if any(c.isspace() for c in value) else Path(value[-8:]).suffix.lower()


def inside(root: Path, name: object, limit: int = MAX_FILE_BYTES) -> Path:
    """The regular file ``name`` in ``root``. Raises SampleError (outside, missing, more than ``limit`` bytes)."""
    if not isinstance(name, str):
        raise SampleError(f"a path is expected, not {type(name).__name__}")
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise SampleError(f"{name}: leads out of the data set's folder")
        info = path.stat()
    except FileNotFoundError:
        raise SampleError(f"{name}: there is no such file") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise SampleError(f"{name[:200]}: can not be opened: {error}") from None
    if not stat.S_ISREG(info.st_mode):
        raise SampleError(f"{name}: is not a file")
    if info.st_size > limit:
        raise SampleError(f"{name}: has {info.st_size} bytes, more than the limit of {limit}")
    return path


def _open(root: Path, value: object, kind: str, *valid: str) -> tuple[Path, str]:
    path = inside(root, value)
    suffix = path.suffix.lower()
    if suffix not in valid:
        raise SampleError(f"{value}: {kind} values are read from {', '.join(valid)}")
    return path, suffix


def _sensor(root: Path, value: object, to: Target) -> Array:
    if isinstance(value, list):
        # Among texts numpy gives each the room of the longest: a line of 1 MiB could ask for a hundred GiB.
        for cell in (cell for row in value for cell in (row if isinstance(row, list) else (row,))):
            if isinstance(cell, list):
                raise SampleError("has 3 axes or more; [time, channels] is expected")
            if not isinstance(cell, int | float):
                raise SampleError(f"values of type {type(cell).__name__} are not numbers")
        try:
            rows = np.asarray(value)
        except (ValueError, OverflowError):
            raise SampleError("its rows differ in length") from None
    else:
        path, suffix = _open(root, value, "sensor", ".npy", ".csv")
        rows = read_npy(path) if suffix == ".npy" else _csv(path)
    if rows.ndim == 1:
        rows = rows[:, None]
    if rows.ndim != 2:
        raise SampleError(f"has {rows.ndim} axes; [time, channels] is expected")
    return as_values(rows, "sensor")


def _csv(path: Path) -> Array:
    rows: list[Array] = []
    number = 0
    with path.open("rb") as file:
        while data := file.readline(MAX_LINE_BYTES + 1):
            if len(data) > MAX_LINE_BYTES:
                raise DataError(f"row {number + 1} has more than {MAX_LINE_BYTES} bytes")
            line = _utf8(data).strip()
            if not line:
                continue
            number += 1
            try:
                rows.append(np.array([float(cell) for cell in line.split(",")]))
            except ValueError:
                if number > 1:  # the first line may be a head line
                    raise DataError(f"row {number} is not a row of numbers: {line[:60]!r}") from None
            if rows and len(rows[-1]) != len(rows[0]):
                raise DataError(f"row {number} has {len(rows[-1])} values, the rows above {len(rows[0])}")
    return np.array(rows)


def _vision(root: Path, value: object, to: Target) -> Array:
    path, suffix = _open(root, value, "vision", ".png", ".jpg", ".jpeg", ".npy")
    if suffix != ".npy":
        return _picture(path, to.shape)
    array = as_values(read_npy(path), "vision")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3:
        raise SampleError(f"has {array.ndim} axes; [height, width, channels] is expected")
    with np.errstate(invalid="ignore"):
        if array.size and (array.min() < 0 or array.max() > 1):
            raise SampleError(f"pixels from {array.min():g} to {array.max():g}; store bytes, or numbers in 0..1")
    return array


def _picture(path: Path, shape: tuple[int, ...]) -> Array:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MissingDependencyError("pillow", "train") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is stricter
            with Image.open(path, formats=("PNG", "JPEG")) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise SampleError(f"{path.name}: {image.width} x {image.height} pixels are too many")
                if image.mode.startswith(("I", "F")):
                    raise SampleError(f"{path.name}: 16-bit pictures are not supported; store .npy in 0..1")
                picture = ImageOps.exif_transpose(image)
                grey = shape[2] == 1 if len(shape) == 3 and shape[2] else image.mode in {"1", "L", "LA"}
                white = Image.new("RGBA", picture.size, "white")
                white.alpha_composite(picture.convert("RGBA"))
                picture = white.convert("L" if grey else "RGB")
                if len(shape) == 3 and picture.size != (shape[1], shape[0]):
                    picture = picture.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
                pixels = np.asarray(picture, dtype=np.float32) / np.float32(255)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"not a readable picture: {error}") from None
    return np.asarray(pixels[:, :, None] if grey else pixels)


def _audio(root: Path, value: object, to: Target) -> Array:
    path, suffix = _open(root, value, "audio", ".wav", ".npy")
    if suffix == ".wav" and to.kind == "features":
        raise DataError(
            "a pretrained audio encoder has its own spectrogram; store what its feature extractor gives as .npy"
        )
    if suffix == ".wav":
        samples, rate = read_wav(path)
        frames, bands = to.shape if len(to.shape) == 2 else (None, DEFAULT_BANDS)
        return log_mel(samples, rate, bands, frames)
    array = as_values(read_npy(path), "audio")
    if array.ndim != 2:
        raise SampleError(f"has {array.ndim} axes; [frames, bands] is expected")
    return array


def _text(root: Path, value: object, to: Target) -> Array:
    if not isinstance(value, str):
        raise SampleError(f"a text is expected, not {type(value).__name__}")
    length = to.shape[0] if to.shape else DEFAULT_LENGTH
    suffix = _suffix(value)
    if suffix != ".npy":
        return read_text(_utf8(inside(root, value, MAX_TEXT_BYTES).read_bytes()) if suffix == ".txt" else value, to)
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


def _utf8(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError("is not UTF-8 text") from None


#: kind -> reader(folder, value, target). ``features``: audio for a pretrained encoder.
READERS: dict[str, Callable[[Path, object, Target], Array]] = {
    "sensor": _sensor,
    "vision": _vision,
    "audio": _audio,
    "text": _text,
    "features": _audio,
}
KINDS = ("sensor", "vision", "audio", "text")
