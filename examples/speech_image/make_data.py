"""Signs, drawn, and what is called out at them, computed: speech_image/{images,audio}/<label>_<number>.png and .wav."""

from __future__ import annotations

import math
import sys
import wave
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

RATE = 8000  # Hz
#: Where the arrow points, in degrees, and the first two resonances (Hz) of the word's two vowels.
SIGNS = {
    "left": (180, (550, 1800), (400, 2000)),
    "right": (0, (700, 1200), (300, 2300)),
    "stop": (None, (570, 850), (570, 850)),
    "up": (270, (640, 1200), (300, 870)),
}


def word(label: str, rng: np.random.Generator) -> np.ndarray:
    """0.4 to 0.6 s of sound in -1 to 1."""
    voice, syllables = rng.uniform(100, 220), []  # Hz
    for first, second in SIGNS[label][1:]:
        time = np.arange(int(RATE * rng.uniform(0.2, 0.3))) / RATE
        tones = [(voice, 0.3), (first * rng.uniform(0.95, 1.05), 0.4), (second * rng.uniform(0.95, 1.05), 0.25)]
        sound = sum(loudness * np.sin(2 * math.pi * pitch * time) for pitch, loudness in tones)
        syllables.append(sound * np.hanning(len(time)))
    return np.clip((said := np.concatenate(syllables)) + rng.normal(0, 0.06, len(said)), -1, 1)


def sign(label: str, rng: np.random.Generator) -> Image.Image:
    """32 x 32 pixels: an arrow, or an octagon for stop."""
    picture = Image.fromarray(rng.normal(rng.uniform(90, 170), 25, (32, 32, 3)).clip(0, 255).astype(np.uint8))
    corners = [(-1, 0.35), (0, 0.35), (0, 0.8), (1, 0), (0, -0.8), (0, -0.35), (-1, -0.35)]
    if SIGNS[label][0] is None:
        corners = [(math.cos(math.pi * (k + 0.5) / 4), math.sin(math.pi * (k + 0.5) / 4)) for k in range(8)]
    turn, radius = math.radians((SIGNS[label][0] or 0) + rng.uniform(-15, 15)), rng.uniform(8, 13)
    x, y = 16 + rng.uniform(-3, 3, 2)
    turned = [(a * math.cos(turn) - b * math.sin(turn), a * math.sin(turn) + b * math.cos(turn)) for a, b in corners]
    ImageDraw.Draw(picture).polygon([(x + radius * a, y + radius * b) for a, b in turned], fill=(235, 235, 225))
    return picture


def main(folder: Path, samples: int) -> None:
    rng = np.random.default_rng(3)
    for part in ("images", "audio"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for i in range(samples):
        label = list(SIGNS)[i % 4]
        sign(label, rng).save(folder / f"images/{label}_{i:04d}.png")
        with wave.open(str(folder / f"audio/{label}_{i:04d}.wav"), "wb") as sound:
            sound.setparams((1, 2, RATE, 0, "NONE", "not compressed"))
            sound.writeframes((word(label, rng) * 30000).astype("<i2").tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "speech_image"), int(sys.argv[2]) if len(sys.argv) > 2 else 320)
