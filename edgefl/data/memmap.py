"""Rows of an array that lie on disk and are read when they are asked for: they never enter memory as a whole.

Not memory-mapped: pages of a mapping that were touched count as the process's own, in the kernel's high-water mark too.
The file has no name, so that it is gone with its process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.errors import StoreError
from edgefl.storage.disk import store_errors, write_all

Array = npt.NDArray[Any]
#: Bytes copied at a time when a whole array is written.
_BLOCK_BYTES = 2**22


class RowFile:
    """A file of rows [n, *shape] of one type, in ``folder``; its room is taken at once. Raises StoreError."""

    def __init__(self, folder: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        self.nbytes = shape[0] * self.row_bytes
        with store_errors("make a file for rows in", folder, self.nbytes):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = _nameless(folder)
            weakref.finalize(self, os.close, self._descriptor)
            if self.nbytes:
                os.posix_fallocate(self._descriptor, 0, self.nbytes)

    def write(self, rows: npt.NDArray[np.int64], values: Array) -> None:
        """Put ``values`` [k, *shape] at these rows [k]. Raises StoreError."""
        data = np.ascontiguousarray(values, self.dtype)
        with store_errors("write rows", Path("a nameless file"), data.nbytes):
            for first, last in _runs(rows):
                write_all(self._descriptor, data[first:last].data, int(rows[first]) * self.row_bytes)

    def read(self, rows: npt.NDArray[np.int64]) -> Array:
        """[k, *shape] of these rows [k]. Raises StoreError."""
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        with store_errors("read rows of", Path("a nameless file"), out.nbytes):
            for first, last in _runs(rows):
                self._read_into(out[first:last], int(rows[first]) * self.row_bytes)
        return out

    def _read_into(self, out: Array, offset: int) -> None:
        rest = memoryview(out.data).cast("B") if out.nbytes else memoryview(b"")
        while rest:
            got = os.preadv(self._descriptor, [rest], offset)
            if not got:
                raise StoreError(f"rows at byte {offset} of {self.nbytes} are gone")
            rest, offset = rest[got:], offset + got


class FileRows:
    """Some rows of a file, in an order of their own; taking rows of it copies no values."""

    def __init__(self, file: RowFile, places: npt.NDArray[np.int64]) -> None:
        self._file = file
        self._places = places
        self.dtype = file.dtype
        self.shape = (len(places), *file.shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Size of these rows, were they in memory."""
        return len(self) * self._file.row_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self._file.nbytes

    def __getitem__(self, rows: Any) -> Array:
        """The values of rows (indices or flags), read now."""
        return self._file.read(self._places[rows])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)

    def take(self, rows: npt.NDArray[np.int64]) -> FileRows:
        """These rows, without reading them."""
        return FileRows(self._file, self._places[rows])


#: The values of one modality [N, *shape], in memory or on disk.
Rows = Array | FileRows


def on_disk(values: Rows, folder: Path) -> FileRows:
    """The same values in a file. Raises StoreError."""
    if isinstance(values, FileRows):
        return values
    file = RowFile(folder, values.shape, values.dtype)
    step = max(1, _BLOCK_BYTES // max(1, file.row_bytes))
    for start in range(0, len(values), step):
        block = values[start : start + step]
        file.write(np.arange(start, start + len(block)), block)
    return FileRows(file, np.arange(len(values)))


def chosen(values: Rows, rows: npt.NDArray[np.int64]) -> Rows:
    """The rows of ``values``: of an array a copy, of a file none."""
    return values.take(rows) if isinstance(values, FileRows) else values[rows]


def _runs(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """(first, last + 1) positions of neighbouring rows that lie beside each other in the file."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _nameless(folder: Path) -> int:
    with contextlib.suppress(AttributeError, OSError):  # not every file system can
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, name = tempfile.mkstemp(dir=folder)
    Path(name).unlink()
    return descriptor


def room_error(error: StoreError) -> bool:
    """Whether the disk was full."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
