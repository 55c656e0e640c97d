"""Sounds as mono samples: every format of libsndfile by the package soundfile; without it, PCM in .wav alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.data.log_mel import HIGH_HZ, MAX_CLIP_S, MAX_RATE_HZ, Samples, read_wav
from edgefl.errors import DataError, MissingDependencyError

#: More channels than any recording of a room has; bounds what a file's head can make us take.
_MOST_CHANNELS = 64


class SoundHead(NamedTuple):
    """Length of a clip in seconds and its sampling rate in Hz."""

    seconds: float
    rate: int


def read_sound(path: Path) -> tuple[Samples, int]:
    """Mono samples [n], -1..1 at full scale, and the sampling rate of a sound file.

    Raises DataError, MissingDependencyError for another format than PCM in .wav without soundfile.
    """
    soundfile = _soundfile(path)
    if soundfile is None:
        return read_wav(path)
    try:
        with soundfile.SoundFile(path) as sound:
            _check(sound.samplerate, sound.channels)
            most = int(MAX_CLIP_S * sound.samplerate)
            samples = sound.read(most + 1, dtype="float32", always_2d=True)  # a head may tell another length
            rate = sound.samplerate
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        why = getattr(error, "error_string", error)  # without the path, which whoever reads the file names
        raise DataError(f"not a readable sound: {why}") from None
    if len(samples) > most:
        raise DataError(f"the clip is longer than {MAX_CLIP_S:.0f} s")
    if not len(samples):
        raise DataError("the clip is empty")
    if not np.isfinite(samples).all():
        raise DataError("its samples are not finite (NaN or infinite)")
    return samples.mean(axis=1, dtype=np.float32), rate


def sound_head(path: Path) -> SoundHead:
    """The length and rate of a sound file, by its head where that says it. Errors as in ``read_sound``."""
    samples, rate = read_sound(path)
    return SoundHead(len(samples) / rate, rate)


def _check(rate: int, channels: int) -> None:
    if rate < 2 * HIGH_HZ:
        raise DataError(f"sampling rate {rate} Hz; at least {2 * HIGH_HZ:.0f} Hz is needed")
    if rate > MAX_RATE_HZ:  # windows, and with them filters, are as long as the rate is high
        raise DataError(f"sampling rate {rate} Hz; at most {MAX_RATE_HZ} Hz is admitted")
    if channels > _MOST_CHANNELS:
        raise DataError(f"{channels} channels; at most {_MOST_CHANNELS} are admitted")


def _soundfile(path: Path):  # type: ignore[no-untyped-def] # a module
    """The package soundfile, None where it is not installed and not needed."""
    try:
        import soundfile
    except (ModuleNotFoundError, OSError) as error:  # OSError: without libsndfile
        if path.suffix.lower() == ".wav":
            return None
        raise MissingDependencyError("soundfile", "sound") from error
    return soundfile
