"""Sound to log-mel spectrogram, in numpy: windows of 32 ms every 16 ms, bands from 50 to 4000 Hz.

The bands are fixed in hertz, not relative to the sampling rate, so that recordings at 8, 16 or 44.1 kHz are comparable.
Mel scale: 2595 log10(1 + f/700) (O'Shaughnessy, Speech Communication, 1987).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

WINDOW_S, HOP_S = 0.032, 0.016  # at 8 kHz 256 and 128 samples: one second gives 61 frames
LOW_HZ, HIGH_HZ = 50.0, 4000.0  # the band of telephone speech
FLOOR_DB = -80.0  # below the clip's peak: the span of 13 bits, beneath which recordings hold noise


def frames_of(seconds: float) -> int:
    """Frames of a clip of this length."""
    return max(1, 1 + math.floor((seconds - WINDOW_S) / HOP_S + 1e-6))


def log_mel(samples: Samples, rate: int, bands: int, frames: int | None = None) -> npt.NDArray[np.float32]:
    """[frames, bands] in 0..1: 0 is 80 dB below the clip's loudest bin, 1 the loudest; cut or padded with 0 at the end.

    ``samples`` [n] mono. ``frames`` None: as many as the clip holds. Silence gives zeros, and so does what lies 80 dB
    below the loudest above the bands.
    """
    window, hop = round(rate * WINDOW_S), round(rate * HOP_S)
    if frames is not None:
        samples = samples[: (frames - 1) * hop + window]
    if len(samples) < window:
        samples = np.pad(samples, (0, window - len(samples)))
    cut = np.lib.stride_tricks.sliding_window_view(samples, window)[::hop]  # [F, window]
    bank = mel_bank(rate, bands, window)  # [bins, bands]
    points = 2 * (len(bank) - 1)
    power = np.abs(np.fft.rfft(cut * np.hanning(window), n=points)) ** 2  # [F, bins]
    mel = power @ bank
    above = power[:, np.arange(len(bank)) * rate / points > HIGH_HZ]
    mel[mel < above.max(initial=0.0) * 10 ** (FLOOR_DB / 10)] = 0  # noise beside what is louder above the bands
    peak = mel.max()
    if peak <= 0:
        level = np.zeros_like(mel)
    else:
        level = 1 - np.clip(10 * np.log10(np.maximum(mel / peak, 10 ** (FLOOR_DB / 10))), FLOOR_DB, 0) / FLOOR_DB
    if frames is not None:
        level = np.pad(level, ((0, frames - len(level)), (0, 0)))
    return level.astype(np.float32)


def mel_bank(rate: int, bands: int, window: int) -> npt.NDArray[np.float64]:
    """[bins, bands] triangular filters of peak 1; the transform is long enough that each filter holds a bin."""
    low, high = (2595 * np.log10(1 + np.array([LOW_HZ, HIGH_HZ]) / 700)).tolist()
    mel = np.linspace(low, high, bands + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    points = 1 << (window - 1).bit_length()
    while rate / points > (edges[2] - edges[0]) / 2:
        points *= 2
    bins = np.arange(points // 2 + 1)[:, None] * rate / points
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.asarray(np.maximum(0, np.minimum(rising, falling)))
