"""Pictures as arrays: turned upright, on white, brought to a size by stretching or by cutting out the middle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from edgefl.data.arrays import Array
from edgefl.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from PIL import Image

#: Beyond the largest phone cameras. 4 bytes a pixel decoded, and as much turned or on white: 400 MB; as numbers, where
#: it is not made smaller, 1.1 GB.
MAX_PIXELS = 50_000_000
#: Formats by Pillow's names: what a file is, its content says. Of animated ones the first picture.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
#: The largest number of 16 bit.
DEEPEST = 65535
#: Rows put on white at a time, which takes three copies of them.
_ROWS = 256


def read_picture(path: Path, shape: tuple[int, ...], crop: Literal["stretch", "center"]) -> Array:
    """[height, width, channels] in 0..1 of a picture's first frame, turned upright, on white; ``shape`` (): as it is.

    Grey of 16 bit keeps its depth. Raises DataError, MissingDependencyError.
    """
    with opened(path) as image:
        from PIL import Image, ImageOps

        deep = image.mode.startswith(("I", "F"))  # numbers of more than 8 bit, of one channel
        grey = shape[2] == 1 if len(shape) == 3 and shape[2] else deep or image.mode in {"1", "L", "LA"}
        ImageOps.exif_transpose(image, in_place=True)
        largest = 255 if not deep else 1 if image.mode == "F" else DEEPEST
        picture = _numbers(image, largest) if deep else _on_white(image, "L" if grey else "RGB")
        if len(shape) == 3 and picture.size != (shape[1], shape[0]):
            box = _middle(picture.size, (shape[1], shape[0])) if crop == "center" else None
            picture = picture.resize((shape[1], shape[0]), Image.Resampling.BILINEAR, box)
        pixels = np.array(picture, dtype=np.float32)
        pixels /= np.float32(largest)
    if pixels.ndim == 3:
        return pixels
    return np.asarray(pixels[:, :, None] if grey else np.repeat(pixels[:, :, None], 3, axis=2))


def picture_facts(path: Path) -> tuple[int, int, int]:
    """(height, width, largest value where it has 16 bit, else 0) of a picture that is whole.

    Raises DataError, MissingDependencyError.
    """
    with opened(path) as image:
        size = image.height, image.width
        image.draft("L", (8, 8))  # of a .jpg an eighth is decoded, which shows as well where it ends early
        image.load()
        return (*size, int(image.convert("I").getextrema()[1]) if image.mode.startswith("I") else 0)


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """The file as Pillow opens it, whatever its name ends in. Raises DataError, also for faults while it is used."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingDependencyError("pillow", "serve") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow: bombs, where our own limit is stricter, and damaged tags
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(f"{image.width} x {image.height} pixels are too many")
                yield image
    except Image.UnidentifiedImageError:
        raise DataError(f"no picture of a format that is read: {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"not a readable picture: {error}") from None


def _numbers(image: Image.Image, largest: float) -> Image.Image:
    """A picture of 16 bit, or of numbers, as floats. Raises DataError beyond 0 and ``largest``."""
    picture = (image if image.mode == "F" else image.convert("I")).convert("F")
    low, high = picture.getextrema()
    if not 0 <= low <= high <= largest:
        raise DataError(f"pixels from {low:g} to {high:g}; store bytes, 16 bit, or numbers in 0..1")
    return picture


def _on_white(picture: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    from PIL import Image

    found = Image.new(mode, picture.size)
    for top in range(0, picture.height, _ROWS):
        part = picture.crop((0, top, picture.width, min(top + _ROWS, picture.height))).convert("RGBA")
        white = Image.new("RGBA", part.size, "white")
        found.paste(Image.alpha_composite(white, part).convert(mode), (0, top))
    return found


def _middle(size: tuple[int, int], wanted: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest middle part of a picture of ``size`` (width, height) with the proportions of ``wanted``."""
    scale = min(have / want for have, want in zip(size, wanted, strict=True))
    width, height = (scale * want for want in wanted)
    left, top = (size[0] - width) / 2, (size[1] - height) / 2
    return left, top, left + width, top + height
