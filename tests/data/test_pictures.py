"""Pictures of every mode come out as they did put on white whole, and take little memory on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image, ImageOps

from edgefl.data.pictures import picture_facts, read_picture
from edgefl.errors import DataError

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


@pytest.mark.parametrize("name", ["a.webp", "a.bmp", "a.gif", "a.tiff", "wrong.jpg"])
def test_pictures_of_every_usual_format_are_read_by_their_content(tmp_path: Path, name: str):
    colours = np.zeros((8, 12, 3), np.uint8)
    colours[:, 6:] = (255, 128, 0)
    format_ = "WEBP" if name in {"wrong.jpg", "a.webp"} else None
    Image.fromarray(colours).save(tmp_path / name, format_, **({"lossless": True} if format_ else {}))
    assert picture_facts(tmp_path / name) == (8, 12, 0)
    np.testing.assert_array_equal(read_picture(tmp_path / name, (), "stretch"), np.float32(colours) / 255)


def test_the_first_frame_of_an_animation_counts(tmp_path: Path):
    frames = [Image.new("L", (4, 4), value) for value in (255, 0)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert (read_picture(tmp_path / "a.gif", (), "stretch") == 1).all()


@pytest.mark.parametrize("name", ["a.png", "a.tiff"])
def test_grey_of_16_bit_keeps_its_depth(tmp_path: Path, name: str):
    """1000 and 1001 of 65535 are one value in 8 bit."""
    grey = np.array([[0, 1000], [1001, 65535]], np.uint16)
    Image.fromarray(grey).save(tmp_path / name)
    found = read_picture(tmp_path / name, (), "stretch")
    np.testing.assert_allclose(found[:, :, 0], grey / 65535, rtol=1e-6)
    assert (read_picture(tmp_path / name, (2, 2, 3), "stretch") == found).all()


def test_numbers_beyond_one_are_refused(tmp_path: Path):
    Image.fromarray(np.array([[0.0, 900.0]], np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match="pixels from 0 to 900"):
        read_picture(tmp_path / "a.tiff", (), "stretch")


def test_a_picture_of_too_many_pixels_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgefl.data.pictures.MAX_PIXELS", 99)
    for name in ("a.png", "a.gif", "a.webp", "a.tiff", "a.bmp"):
        Image.new("L", (10, 10)).save(tmp_path / name)
        with pytest.raises(DataError, match="10 x 10 pixels are too many"):
            read_picture(tmp_path / name, (), "stretch")
        with pytest.raises(DataError, match="too many"):
            picture_facts(tmp_path / name)
