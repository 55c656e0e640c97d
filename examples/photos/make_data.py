"""Photos as people keep them: photos/<person>/<label>/<number>.png, with a note beside some. Drawn, none is real."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CORNERS = {"circle": 60, "cross": 12, "square": 4, "triangle": 3}  # of a polygon; 60 are as good as round
NOTES = {
    "circle": ["it is round", "no corner anywhere"],
    "cross": ["two bars, one over the other", "four arms"],
    "square": ["four sides alike", "four right angles"],
    "triangle": ["three sides", "a tip, and a base"],
}
COLOURS = {"red": (200, 60, 50), "green": (60, 150, 70), "blue": (50, 80, 190), "yellow": (220, 190, 60)}


def outline(label: str, rng: np.random.Generator, size: int) -> list[tuple[float, float]]:
    """The corners of a shape, anywhere in a picture of ``size`` pixels, turned a little."""
    corners, radius, turn = CORNERS[label], size * rng.uniform(0.22, 0.38), rng.uniform(-0.3, 0.3)
    centre = size / 2 + rng.uniform(-0.1, 0.1, 2) * size
    angles = 2 * math.pi * np.arange(corners) / corners - math.pi / (4 if label == "square" else 2)
    flat = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    if label == "cross":
        x = np.array([1, -1, -1, -3, -3, -1, -1, 1, 1, 3, 3, 1]) / 3.2
        flat = np.stack([x, np.roll(x, 3)], axis=1)  # its twelve corners, a quarter further for the other axis
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    return [(float(x), float(y)) for x, y in centre + radius * flat @ rotation]


def main(folder: Path, samples: int) -> None:
    rng = np.random.default_rng(1)
    for i in range(samples):
        label, person = list(CORNERS)[i % 4], ("anna", "ben", "cleo", "dan")[int(rng.integers(4))]
        colour, size = list(COLOURS)[int(rng.integers(4))], int(rng.choice([32, 40]))
        noise = rng.normal(rng.uniform(120, 235), 18, (size, size, 3)).clip(0, 255).astype(np.uint8)
        picture = Image.fromarray(noise)
        ImageDraw.Draw(picture).polygon(outline(label, rng, size), fill=COLOURS[colour])
        there = folder / person / label
        there.mkdir(parents=True, exist_ok=True)
        picture.save(there / f"{i:04d}.png")
        if rng.random() < 0.8:  # not everybody writes a note
            (there / f"{i:04d}.txt").write_text(f"{colour}, {NOTES[label][int(rng.integers(2))]}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "photos"), int(sys.argv[2]) if len(sys.argv) > 2 else 400)
