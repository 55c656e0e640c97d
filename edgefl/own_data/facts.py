"""Facts about a data set's files that an encoder's preparation is chosen by: sizes, lengths, rates, words."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgefl.data.arrays import read_npy
from edgefl.data.encoding import decoded
from edgefl.data.pictures import DEEPEST, picture_facts
from edgefl.data.readers import inside
from edgefl.data.recording import Recording, is_number, read_csv
from edgefl.data.sounds import read_sound
from edgefl.errors import DataError, MissingDependencyError
from edgefl.own_data.understood import Understood
from edgefl.records import TableColumn

#: Texts that are looked into.
LOOKED_AT = 200
#: Share of numbers among a text's words by which it is a table.
_NUMBERS = 0.9
#: Rows as rare as this may come of a time column in another unit than seconds: 5 ms, 200 Hz, are 5 s.
_SLOW_HZ = 0.2
#: Bad files that are named in an error.
_NAMED = 5


class Facts(NamedTuple):
    """Properties of a modality's values. Empty where its kind has no such thing.

    ``sides``: the shorter sides of pictures, in pixels; ``alike``: whether all have one shape; ``peak``: the largest
    value of those of 16 bit, 0: there are none; ``seconds``: of sounds;
    ``words``: of texts; ``steps``: rows of recordings, of one with ``gaps`` of its longest stretch without;
    ``channels``; ``rate``: Hz by their time columns, 0: not known; ``columns``: of the user's table that it is read
    from.
    """

    kind: str
    sides: Sequence[int] = ()
    alike: bool = True
    peak: int = 0
    seconds: Sequence[float] = ()
    words: Sequence[int] = ()
    steps: Sequence[int] = ()
    gaps: bool = False
    channels: int = 0
    rate: float = 0.0
    columns: Sequence[TableColumn] = ()


def facts_of(found: Understood, modality: str, *, skip_bad: bool = False) -> Facts:
    """The facts of one modality, of texts from some of them; with ``skip_bad`` what cannot be read is left out.

    Raises DataError that counts the files which cannot be read, with ``skip_bad`` only where none can be.
    """
    values = [sample.values[modality] for sample in found.samples if modality in sample.values]
    kind = found.kinds[modality]
    columns = found.columns.get(modality, ())
    if kind == "table":
        return Facts(kind, columns=columns)
    if kind == "text":
        if _are_numbers(found.root, _spread(values)):
            found.said.append(f"the texts of {modality} are numbers: a sensor's recordings are files called .csv")
        return _texts(found.root, _spread(values))._replace(columns=columns)
    seen, bad = [], {}
    for value in values:
        try:
            seen.append(_LOOK[kind](found.root, value))
        except MissingDependencyError:
            raise
        except DataError as error:
            bad[str(value)] = error.message
    if bad and (not skip_bad or not seen):
        listed = "; ".join(f"{name}: {why}" for name, why in list(bad.items())[:_NAMED])
        more = f"; … and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise DataError(
            f"{len(bad)} of {len(values)} files of {modality} cannot be used ({listed}{more})",
            remedy="Mend or remove them, or leave such files out by --skip-bad.",
        )
    found.unused |= {name: f"cannot be used: {why}" for name, why in bad.items()}
    for sample in found.samples if bad else ():
        if str(sample.values.get(modality)) in bad:
            del sample.values[modality]
    found.samples = [sample for sample in found.samples if sample.values]
    gathered = _GATHER[kind](seen)._replace(columns=columns)
    if 0 < gathered.rate <= _SLOW_HZ:
        every = f"{1 / gathered.rate:.6g} s"
        found.said.append(f"the rows of {modality} come every {every}; if not, name the unit of their time, as time_ms")
    if 0 < gathered.peak <= DEEPEST // 4:
        way = f"nearly black: multiply them by {(DEEPEST + 1) >> gathered.peak.bit_length()}"
        found.said.append(f"the 16-bit pictures of {modality} go up to {gathered.peak} of {DEEPEST}, {way}")
    return gathered


def _spread(values: Sequence[object]) -> list[object]:
    step = max(1, len(values) // LOOKED_AT)
    return list(values[::step][:LOOKED_AT])


def _picture(root: Path, value: object) -> tuple[int, int, int]:
    return picture_facts(inside(root, value))


def _pictures(seen: list[tuple[int, int, int]]) -> Facts:
    shapes = [(height, width) for height, width, _ in seen]
    peak = max(each[2] for each in seen)
    return Facts("vision", sides=[min(shape) for shape in shapes], alike=len(set(shapes)) == 1, peak=peak)


def _sound(root: Path, value: object) -> float:
    """Seconds."""
    samples, rate = read_sound(inside(root, value))
    return len(samples) / rate


def _sounds(seconds: list[float]) -> Facts:
    return Facts("audio", seconds=seconds)


def _texts(root: Path, values: Sequence[object]) -> Facts:
    return Facts("text", words=[len(_text(root, value).split()) for value in values])


def _text(root: Path, value: object) -> str:
    text = str(value)
    if text.endswith(".txt") and not any(c.isspace() for c in text):
        try:
            return decoded(inside(root, text).read_bytes())
        except DataError:  # its reader names it
            return ""
    return text


def _are_numbers(root: Path, values: Sequence[object]) -> bool:
    """Whether texts are numbers, beside a head line."""
    cells = [re.split(r"[\s,;]+", _text(root, value).strip(" \r\n,;")) for value in values]
    return all(sum(map(is_number, text)) >= _NUMBERS * len(text) for text in cells)


def _sensor(root: Path, value: object) -> tuple[int, int, float, bool]:
    """Steps without a gap, channels, seconds from one step to the next (0: not known), and whether there are gaps."""
    if isinstance(value, list):
        return len(value), 1, 0.0, False
    path = inside(root, value)
    recording = Recording(np.atleast_1d(read_npy(path))) if path.suffix.lower() == ".npy" else read_csv(path)
    channels = recording.rows.shape[1] if recording.rows.ndim > 1 else 1
    times = np.empty(0) if recording.times is None else recording.times
    absent = np.flatnonzero(np.isnan(recording.rows).any(axis=tuple(range(1, recording.rows.ndim))))
    steps = int(np.diff([-1, *absent, len(recording.rows)]).max()) - 1
    return steps, channels, float(np.median(np.diff(times))) if len(times) > 2 else 0.0, bool(absent.size)


def _sensors(recordings: list[tuple[int, int, float, bool]]) -> Facts:
    steps, channels, periods, gaps = (list(each) for each in zip(*recordings, strict=True))
    timed = [period for period in periods if period]
    rate = 1 / statistics.median(timed) if timed and min(timed) > 0 else 0.0
    return Facts("sensor", alike=len(set(steps)) == 1, steps=steps, gaps=any(gaps), channels=channels[-1], rate=rate)


#: Kind -> what is seen of one file, and the facts of what was seen of several.
_LOOK: Mapping[str, Callable[[Path, object], Any]] = {"vision": _picture, "audio": _sound, "sensor": _sensor}
_GATHER: Mapping[str, Callable[[list[Any]], Facts]] = {"vision": _pictures, "audio": _sounds, "sensor": _sensors}


def most(values: Sequence[float]) -> float:
    """The value that nineteen of twenty do not exceed."""
    return sorted(values)[int(0.95 * (len(values) - 1))]
