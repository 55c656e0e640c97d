"""Facts about a data set's files that an encoder's preparation is chosen by: sizes, lengths, rates, words."""

from __future__ import annotations

import statistics
import wave
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.data.arrays import read_npy
from edgefl.data.readers import inside
from edgefl.data.recording import Recording, read_csv
from edgefl.errors import DataError, MissingDependencyError
from edgefl.own_data.understood import Understood
from edgefl.records import TableColumn

#: Files of a modality that are looked into.
LOOKED_AT = 200


class Facts(NamedTuple):
    """Properties of a modality's values. Empty where its kind has no such thing.

    ``sides``: the shorter sides of pictures, in pixels; ``alike``: whether all have one shape; ``seconds``: of sounds;
    ``words``: of texts; ``steps``: rows of recordings; ``channels``; ``rate``: Hz by their time columns, 0: not known;
    ``columns``: of the user's table that it is read from.
    """

    kind: str
    sides: Sequence[int] = ()
    alike: bool = True
    seconds: Sequence[float] = ()
    words: Sequence[int] = ()
    steps: Sequence[int] = ()
    channels: int = 0
    rate: float = 0.0
    columns: Sequence[TableColumn] = ()


def facts_of(found: Understood, modality: str) -> Facts:
    """The facts of one modality, from its first files. Raises DataError where none can be read."""
    values = [sample.values[modality] for sample in found.samples if modality in sample.values]
    kind, looked = found.kinds[modality], _spread(values)
    look = {"vision": _pictures, "audio": _sounds, "text": _texts, "sensor": _sensors}
    columns = found.columns.get(modality, ())
    if kind == "table":
        return Facts(kind, columns=columns)
    return look[kind](found.root, looked)._replace(columns=columns)


def _spread(values: Sequence[object]) -> list[object]:
    step = max(1, len(values) // LOOKED_AT)
    return list(values[::step][:LOOKED_AT])


def _paths(root: Path, values: Iterable[object]) -> list[Path]:
    return [inside(root, value) for value in values if isinstance(value, str)]


def _pictures(root: Path, values: Sequence[object]) -> Facts:
    try:
        from PIL import Image
    except ImportError:
        raise MissingDependencyError("pillow", "train") from None
    shapes = []
    for path in _paths(root, values):
        try:
            with Image.open(path, formats=("PNG", "JPEG")) as image:  # reads the head alone
                shapes.append((image.height, image.width))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{path}: is no readable picture: {error}", remedy="Remove or mend it.") from None
    return Facts("vision", sides=[min(shape) for shape in shapes], alike=len(set(shapes)) == 1)


def _sounds(root: Path, values: Sequence[object]) -> Facts:
    seconds = []
    for path in _paths(root, values):
        try:
            with wave.open(str(path), "rb") as sound:
                if not (rate := sound.getframerate()):
                    raise wave.Error("its sampling rate is 0 Hz")
                seconds.append(sound.getnframes() / rate)
        except (wave.Error, EOFError) as error:
            raise DataError(f"{path}: is no readable .wav: {error}", remedy="Save it as PCM .wav.") from None
    return Facts("audio", seconds=seconds)


def _texts(root: Path, values: Sequence[object]) -> Facts:
    words = []
    for value in values:
        text = str(value)
        if text.endswith(".txt") and not any(c.isspace() for c in text):
            text = inside(root, text).read_text("utf-8", "replace")
        words.append(len(text.split()))
    return Facts("text", words=words)


def _sensors(root: Path, values: Sequence[object]) -> Facts:
    steps, channels, periods = [], 0, []
    for value in values:
        if isinstance(value, list):
            steps.append(len(value))
            channels = 1
            continue
        path = inside(root, value)
        try:
            recording = Recording(np.atleast_1d(read_npy(path))) if path.suffix.lower() == ".npy" else read_csv(path)
        except DataError as error:
            raise DataError(f"{path}: {error.message}", remedy="Mend or remove the file.") from None
        steps.append(len(recording.rows))
        channels = recording.rows.shape[1] if recording.rows.ndim > 1 else 1
        if recording.times is not None and len(recording.times) > 2:
            periods.append(float(np.median(np.diff(recording.times))))
    rate = 1 / statistics.median(periods) if periods and min(periods) > 0 else 0.0
    return Facts("sensor", alike=len(set(steps)) == 1, steps=steps, channels=channels, rate=rate)
