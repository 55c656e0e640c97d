"""Pictures as arrays: turned upright, on white, brought to a size by stretching or by cutting out the middle."""

from __future__ import annotations

import warnings
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
#: Formats by Pillow's names; of animated ones the first picture.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
#: What is said of a file that is none of them, however it is called.
UNKNOWN_FORMAT = f"no picture of a format that is read: {', '.join(FORMATS)}"
#: Rows put on white at a time, which takes three copies of them.
_ROWS = 256


def read_picture(path: Path, shape: tuple[int, ...], crop: Literal["stretch", "center"]) -> Array:
    """[height, width, channels] in 0..1 of a picture, turned upright, on white; ``shape`` (): as it is.

    Raises DataError, MissingDependencyError.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise MissingDependencyError("pillow", "serve") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is stricter
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(f"{image.width} x {image.height} pixels are too many")
                if image.mode == "F":
                    raise DataError("its pixels are floating-point numbers; store .npy in 0..1")
                if image.mode.startswith("I"):
                    return _deep(image, shape, crop)
                grey = shape[2] == 1 if len(shape) == 3 and shape[2] else image.mode in {"1", "L", "LA"}
                ImageOps.exif_transpose(image, in_place=True)
                picture = _on_white(image, "L" if grey else "RGB")
                if len(shape) == 3 and picture.size != (shape[1], shape[0]):
                    box = _middle(picture.size, (shape[1], shape[0])) if crop == "center" else None
                    picture = picture.resize((shape[1], shape[0]), Image.Resampling.BILINEAR, box)
                pixels = np.array(picture, dtype=np.float32)
                pixels /= np.float32(255)
    except UnidentifiedImageError:
        raise DataError(UNKNOWN_FORMAT) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"not a readable picture: {error}") from None
    return np.asarray(pixels[:, :, None] if grey else pixels)


def _deep(image: Image.Image, shape: tuple[int, ...], crop: Literal["stretch", "center"]) -> Array:
    """A grey picture of 16 bits [height, width, 1 or as ``shape`` says], by its type's range."""
    from PIL import Image, ImageOps

    picture = Image.fromarray(np.asarray(ImageOps.exif_transpose(image)).astype(np.float32))
    if len(shape) == 3 and picture.size != (shape[1], shape[0]):
        box = _middle(picture.size, (shape[1], shape[0])) if crop == "center" else None
        picture = picture.resize((shape[1], shape[0]), Image.Resampling.BILINEAR, box)
    pixels = np.clip(np.asarray(picture) / np.float32(65535), 0, 1)[:, :, None]
    return np.repeat(pixels, shape[2], axis=2) if len(shape) == 3 and shape[2] > 1 else pixels


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
