"""Numbers as encoders take them, whether they come from a file of arrays, one sample's file or a client."""

from __future__ import annotations

import numpy as np

from edgefl.data.arrays import Array
from edgefl.errors import DataError

#: Beyond 0..1 that a pixel may lie: resizing in half precision rounds by less.
_ROUNDING = 1e-3


def as_values(array: Array, kind: str = "") -> Array:
    """Numbers as an encoder of ``kind`` takes them: float32, or int64 token ids; bytes of an image become 0..1.

    The array itself where it is of that type.
    """
    if kind == "text" or (not kind and array.dtype.kind in "iu" and array.dtype != np.uint8):
        if array.dtype.kind not in "iu":
            raise DataError(f"token ids have to be integers, not {array.dtype}")
        return array.astype(np.int64, copy=False)
    if array.dtype.kind not in "fiub":
        raise DataError(f"values of type {array.dtype} are not numbers")
    if array.dtype == np.uint8 and kind in {"", "vision"}:
        return np.asarray(array.astype(np.float32) / np.float32(255))
    with np.errstate(over="ignore"):  # what is too large becomes infinite and is reported as not finite
        return array.astype(np.float32, copy=False)


def as_cells(array: Array) -> Array:
    """Rows of numbers [N, C], NaN where a cell is absent, as cells [N, C, 2]: the value, and 1 where it is there."""
    values = as_values(array, "table")
    absent = np.isnan(values)
    return np.stack((np.where(absent, np.float32(0), values), (~absent).astype(np.float32)), axis=-1)


def pixel_fault(values: Array) -> str:
    """The range of pixels as text, where it is another than 0..1; "": it is that, or the values are not finite."""
    if not values.size:
        return ""
    low, high = float(values.min()), float(values.max())
    return f"pixels from {low:g} to {high:g}" if low < -_ROUNDING or high > 1 + _ROUNDING else ""
