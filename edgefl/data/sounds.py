"""Sound files as mono samples, by soundfile (libsndfile); without it plain PCM .wav alone, by the standard library.

Nothing is resampled: the bands of ``edgefl.data.log_mel`` are fixed in hertz. Its spectrograms of letters at 8, 16, 22
and 48 kHz differ by less than 0.01 in the mean.
"""

from __future__ import annotations

import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.data.log_mel import HIGH_HZ, Samples
from edgefl.errors import DataError, MissingDependencyError, install_command

MAX_RATE_HZ = 384_000  # twice what studios record with
MAX_CLIP_S = 60.0  # a longer clip is no sample; it would need a longer model than any here
#: Share of a channel's peak below which a mix has nothing but what channels that cancel each other out leave (40 dB).
_REMAINDER = 0.01
#: Values decoded at a time, of all channels: a file of few bytes may claim a thousand channels.
_BLOCK = 2**20


def read_sound(path: Path) -> tuple[Samples, int]:
    """Mono samples [n] in -1..1, about, and the sampling rate. Raises DataError, MissingDependencyError."""
    library = _soundfile(path)
    if library is None:
        return read_wav(path)
    if _half_floats(path):
        raise DataError("holds floating-point numbers of 16 bit, which are not read; save it in 32 bit, or as PCM")
    with _readable(library), library.SoundFile(path) as sound:
        rate = _usable(sound.samplerate)
        parts, count, most, loudest = [], 0, int(MAX_CLIP_S * rate), 0.0
        while len(block := sound.read(max(1, _BLOCK // sound.channels), dtype="float32", always_2d=True)):
            parts.append(block.mean(axis=1, dtype=np.float32))
            loudest = max(loudest, float(np.abs(block).max()))
            if (count := count + len(block)) > most:
                raise _too_long(max(count, sound.frames), rate)
    if not parts:
        raise DataError("the clip is empty")
    samples = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise DataError("holds values that are not finite (NaN or infinite)")
    return _audible(samples, loudest), rate


def read_wav(path: Path) -> tuple[Samples, int]:
    """The same of a PCM .wav file of 8, 16 or 32 bit, without another library. Raises DataError."""
    try:
        with wave.open(str(path), "rb") as sound:
            rate, channels, width = _usable(sound.getframerate()), sound.getnchannels(), sound.getsampwidth()
            if width not in {1, 2, 4}:
                raise wave.Error(f"{8 * width} bit")
            frames, data = sound.getnframes(), sound.readframes(int(MAX_CLIP_S * rate) + 1)
    except (wave.Error, EOFError, ZeroDivisionError, RuntimeError) as error:  # RuntimeError: lengths that disagree
        raise DataError(
            f"not a readable .wav of 8, 16 or 32 bit PCM: {error or 'it ends early'}; other kinds need the package "
            f"'soundfile', which is not installed: {install_command('sound')}"
        ) from None
    usable = len(data) - len(data) % (width * channels)
    if not usable:
        raise DataError("the clip is empty")
    if usable > int(MAX_CLIP_S * rate) * width * channels:
        raise _too_long(frames, rate)
    raw = np.frombuffer(data[:usable], dtype={1: "<u1", 2: "<i2", 4: "<i4"}[width]).astype(np.float32)
    scaled = (raw - 128) / 128 if width == 1 else raw / 2.0 ** (8 * width - 1)
    mixed = scaled.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return _audible(mixed, float(np.abs(scaled).max())), rate


def _half_floats(path: Path) -> bool:
    """Whether a .wav says so; libsndfile calls that an internal error."""
    with path.open("rb") as file:
        head = file.read(64)
    form = head[head.find(b"fmt ") + 8 :]
    return head.startswith(b"RIFF") and form[:2] == b"\3\0" and form[14:16] == b"\x10\0"


def _too_long(frames: int, rate: int) -> DataError:
    lasts = f"lasts {frames / rate:.1f} s, and at most {MAX_CLIP_S:.0f} s are taken"
    return DataError(f"{lasts}; cut it into shorter files")


def _audible(mixed: Samples, loudest: float) -> Samples:
    """The mono mix; zeros where its channels cancel out. ``loudest``: peak over all channels."""
    return mixed if np.abs(mixed).max() > _REMAINDER * loudest else np.zeros_like(mixed)


def _soundfile(path: Path) -> Any:
    """The library; None: a .wav is read without. Raises MissingDependencyError."""
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: without libsndfile
        if path.suffix.lower() != ".wav":
            raise MissingDependencyError("soundfile", "sound") from None
        return None
    return soundfile


@contextmanager
def _readable(library: Any) -> Iterator[None]:
    """Faults of the library as DataError."""
    try:
        yield
    except (library.SoundFileError, OSError, TypeError, ValueError) as error:  # TypeError: claims to be raw samples
        said = (getattr(error, "error_string", "") or str(error)).strip().rstrip(".")
        cut = said.startswith("File does not exist")  # of an .mp3 without a whole frame
        raise DataError(f"not a readable sound: {'it is damaged, or cut short' if cut else said}") from None


def _usable(rate: int) -> int:
    if rate < 2 * HIGH_HZ:
        raise DataError(f"sampling rate {rate} Hz; at least {2 * HIGH_HZ:.0f} Hz is needed")
    if rate > MAX_RATE_HZ:  # windows, and with them filters, are as long as the rate is high
        raise DataError(f"sampling rate {rate} Hz; at most {MAX_RATE_HZ} Hz is admitted")
    return rate
