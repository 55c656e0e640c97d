"""Pictures of every mode come out as they did put on white whole, and take little memory on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image, ImageOps

from edgefl.data.pictures import read_picture

MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"]
#: A picture of 9 million pixels to 32 x 32: kilobytes that it takes beside what there was.
MEASURE = """
import resource, sys
from pathlib import Path
from PIL import Image, ImageOps
from edgefl.data.pictures import read_picture
read_picture(Path(sys.argv[1]), (32, 32, 3), "stretch")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_picture(Path(sys.argv[2]), (32, 32, 3), "stretch")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def whole(path: Path, shape: tuple[int, ...], mode: Literal["L", "RGB"]) -> np.ndarray:
    """The picture put on white in one piece, as the first models saw it."""
    picture = ImageOps.exif_transpose(Image.open(path))
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    found = white.convert(mode)
    if shape:
        found = found.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
    return np.asarray(found, dtype=np.float32) / np.float32(255)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (8, 9, 0)])
@pytest.mark.parametrize("turned", [False, True])
def test_pixels_are_those_of_the_whole_picture_on_white(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, shape: tuple[int, ...], turned: bool
):
    monkeypatch.setattr("edgefl.data.pictures._ROWS", 5)
    noise = np.random.default_rng(3).integers(0, 256, (23, 17, 4), np.uint8)
    picture = Image.fromarray(noise)
    picture = picture if mode == "RGBA" else (picture.convert("RGB") if mode == "CMYK" else picture).convert(mode)
    exif = Image.Exif()
    exif[274] = 6 if turned else 1  # orientation: the camera was held on its side
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    picture.save(path, exif=exif, **({"transparency": 7} if mode == "P" else {}))
    grey = mode in {"1", "L", "LA"}
    found = read_picture(path, shape, "stretch")
    assert found.dtype == np.float32
    assert np.array_equal(found[:, :, 0] if grey else found, whole(path, shape, "L" if grey else "RGB"))


def test_a_large_picture_takes_two_copies_of_itself(tmp_path: Path):
    """Decoded and on white, at 4 bytes a pixel; five copies before."""
    for name, side in (("small", 64), ("large", 3000)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{name}.png")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small.png"), str(tmp_path / "large.png")]
    took = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(took) * 1024 < 3 * 4 * 3000**2
