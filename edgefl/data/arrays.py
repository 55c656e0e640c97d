"""Array files, read with limits and written atomically, and rows of an array that stay on disk.

Pickles are neither read nor written; a header that promises more than the file holds, or more than the limit, is
refused before memory is taken. Rows on disk are not memory-mapped: pages of a mapping that were touched count as the
process's own, in the kernel's high-water mark too. Their file has no name, so that it is gone with its process.
"""

from __future__ import annotations

import ast
import itertools
import math
import mmap
import os
import re
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from edgefl.data.regular_files import regular_file
from edgefl.errors import DataError, StoreError
from edgefl.storage.disk import nameless_file, store_errors, way_out, write_all

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

#: One .npy, image or sound file. A 4096 x 4096 x 3 float32 image has 192 MiB; a sample of an edge device has far less.
MAX_FILE_BYTES = 64 * 2**20
#: A whole data set in memory. The smallest device this project names has 4 GB of memory for everything.
MAX_DATASET_BYTES = 4 * 2**30
#: Bytes read at a time, and copied at a time when a whole array is put on disk.
_READ_BYTES, _COPY_BYTES = 2**20, 2**22
#: From this size on an array is mapped where that is asked for.
_MAPPED_BYTES = 2**20
#: Where a member's header in a .zip has the lengths of its name and of what follows it, two bytes each.
_NAME_LENGTH_AT = 26
#: Floats, signed and unsigned integers, booleans, unicode. No objects, no structures.
_KINDS = "fiubU"
#: Deflate packs 1032 bytes into one at most: a member that claims more lies about its size.
_DEFLATE_MOST = 1032
#: A .npy header as numpy writes it, its three fields in any order. Numpy's own reader evaluates Python and gives memory
#: to whatever shape that names.
_HEADER = re.compile(rb"\{(?: ?'(?:descr|fortran_order|shape)': ?(?:'[^'()\\]*'|True|False|\([0-9L, ]*\)),?){3} ?\}")
MAX_HEADER_BYTES = 10_000  # as numpy's own limit
_MAX_AXES = 32
#: What numpy and zipfile raise for a damaged or hostile file.
_DAMAGE = (ValueError, KeyError, EOFError, OSError, SyntaxError, RuntimeError, NotImplementedError, zlib.error)


def read_npy(path: Path) -> Array:
    """The array of a .npy file of at most MAX_FILE_BYTES. Raises DataError, or OSError when it can't be opened."""
    size = regular_file(path, MAX_FILE_BYTES, "the file").stat().st_size
    with path.open("rb") as file:
        try:
            return _read_array(file, size)
        except _DAMAGE as error:
            raise DataError(f"not a readable .npy file: {error}") from None


def read_npz(path: Path, wanted: Collection[str] | None = None, *, mapped: bool = False) -> dict[str, Array]:
    """The arrays of a .npz file (only the ``wanted`` ones), MAX_DATASET_BYTES at most in all. Raises DataError.

    ``mapped``: large arrays of numbers are pages of the file, read-only, which processes share.
    """
    regular_file(path, MAX_DATASET_BYTES)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            if wanted is not None:
                members = [m for m in members if m.filename[:-4] in wanted]
            total = sum(m.file_size for m in members)
            if total > MAX_DATASET_BYTES:
                raise DataError(f"{path}: {total} bytes of arrays, more than the limit of {MAX_DATASET_BYTES}")
            return {m.filename[:-4]: _read_member(archive, m, path.stat().st_size, mapped) for m in members}
    except (zipfile.BadZipFile, *_DAMAGE) as error:
        remedy = "Write the file anew, for instance with numpy.savez or `edgefl data --out`."
        raise DataError(f"{path}: not a readable .npz file: {error}", remedy=remedy) from None


def npz_names(path: Path) -> list[str]:
    """The names of the arrays in a .npz file that :func:`read_npz` can read."""
    with zipfile.ZipFile(path) as archive:
        return [name[:-4] for name in archive.namelist() if name.endswith(".npy")]


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, archive_bytes: int, mapped: bool) -> Array:
    """One array. What a member says of its size has to be possible before memory is taken for it."""
    name = member.filename[:80]
    if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError(f"{name!r} is packed in a way that numpy does not write")
    most = _DEFLATE_MOST if member.compress_type == zipfile.ZIP_DEFLATED else 1
    packed = min(member.compress_size, archive_bytes - member.header_offset)
    if member.file_size > most * packed:
        raise ValueError(f"{name!r} claims {member.file_size} bytes, and {packed} are there")
    with archive.open(member) as file:
        if mapped and most == 1 and member.file_size >= _MAPPED_BYTES:
            return _mapped(archive, file, member)
        return _read_array(file, member.file_size)


def _mapped(archive: zipfile.ZipFile, file: IO[bytes], member: zipfile.ZipInfo) -> Array:
    """The array of a member that is not compressed, as pages of the archive where they are numbers."""
    dtype, shape, fortran = _read_header(file, member.file_size)
    start = file.tell()
    if dtype.kind not in "fiu" or archive.fp is None:
        file.seek(0)
        return _read_array(file, member.file_size)
    at = member.header_offset + _NAME_LENGTH_AT  # in the member's own header, which its name and more follow
    archive.fp.seek(at)
    lengths = archive.fp.read(4)
    start += at + 4 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    pages = mmap.mmap(archive.fp.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(pages, dtype, math.prod(shape), start)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _read_array(file: IO[bytes], size: int) -> Array:
    """The array in ``file`` of ``size`` bytes. Raises ValueError, EOFError."""
    dtype, shape, fortran = _read_header(file, size)
    array = np.empty(math.prod(shape), dtype)
    rest = memoryview(array.view(np.uint8).data) if array.nbytes else memoryview(b"")
    while rest:
        if not (block := file.read(min(len(rest), _READ_BYTES))):
            raise EOFError("it ends early")
        rest[: len(block)] = block
        rest = rest[len(block) :]
    _check_values(array)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _read_header(file: IO[bytes], size: int) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Type, shape and order of the array in ``file`` of ``size`` bytes, which its values follow. Raises ValueError."""
    version = np.lib.format.read_magic(file)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"format version {version} is not supported")
    length = int.from_bytes(file.read(2 * version[0]), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes, at most {MAX_HEADER_BYTES} can be right")
    dtype, shape, fortran = _parse_header(file.read(length).strip())
    count = math.prod(shape)
    rows = max([count, *shape[:1]])  # of nothing, or of texts without a letter, a file of no size could hold any number
    if dtype.itemsize < 0 or count * dtype.itemsize > size or rows > max(size, MAX_HEADER_BYTES):
        raise ValueError(f"its header promises shape {shape}, more than the file holds")
    return dtype, shape, fortran


@lru_cache(maxsize=64)  # the shares of a fleet have the same ones
def _parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    text = header.decode("latin-1")
    fields = ast.literal_eval(text.replace("L,", ",").replace("L)", ")")) if _HEADER.fullmatch(header) else {}
    if fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"its header is not what numpy writes for numbers: {text[:60]!r}")
    descr, shape, fortran = fields["descr"], fields["shape"], fields["fortran_order"]
    if not isinstance(shape, tuple) or len(shape) > _MAX_AXES or any(size >= 2**63 for size in shape):
        raise ValueError(f"its header promises the shape {str(shape)[:60]}")
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"values of type {str(descr)[:40]!r} are not accepted; store numbers") from error
    if dtype.kind not in _KINDS or dtype.hasobject or not isinstance(fortran, bool):
        raise ValueError(f"values of type {dtype} are not accepted; store numbers")
    return dtype, shape, fortran


def _check_values(array: Array) -> None:
    """Bits that are no value of the type: numpy would take them and fail, or go wrong, much later."""
    if array.dtype.kind == "b":
        np.not_equal(array.view(np.uint8), 0, out=array)
    if array.dtype.kind == "U" and array.nbytes:
        letters = array.view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if ((letters > 0x10FFFF) | ((letters >= 0xD800) & (letters <= 0xDFFF))).any():
            raise ValueError("a text holds what is no character")


def _write_array(file: IO[bytes], array: Array) -> None:
    """Write an array as numpy does, without copies where contiguous."""
    if not array.nbytes or array.dtype.hasobject or not array.flags.forc:
        np.lib.format.write_array(file, array, allow_pickle=False)
        return
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.reshape(-1, order="A").view(np.uint8).data)


def write_npz(path: Path, arrays: Mapping[str, Array], *, durable: bool = True) -> None:
    """Write a .npz: whole or not at all (temporary name, rename), byte-equal for equal arrays.

    ``durable``: synced before it is renamed; else a power cut may leave anything under its name. Raises StoreError
    when the disk refuses.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in arrays.items():
                    # A fixed date, so that the same data gives the same bytes.
                    member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
                    with archive.open(member, "w", force_zip64=True) as target:
                        _write_array(target, np.asanyarray(array))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        text = f"{path}: cannot be written: {error.strerror or error}"
        raise StoreError(text, remedy=way_out(path, error)) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random generator for one purpose (such as a device's name): independent of the order of purposes."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


class RowFile:
    """A file of rows [n, *shape] of one type, in ``folder``; its room is taken at once. Raises StoreError."""

    def __init__(self, folder: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        self.nbytes = shape[0] * self.row_bytes
        self._descriptor = nameless_file(folder, self.nbytes)
        weakref.finalize(self, os.close, self._descriptor)

    def write(self, rows: Indices, values: Array) -> None:
        """Put ``values`` [k, *shape] at these rows [k]. Raises StoreError."""
        data = np.ascontiguousarray(values, self.dtype)
        with store_errors("write rows", "a nameless file", data.nbytes):
            for first, last in _runs(rows):
                write_all(self._descriptor, data[first:last].data, int(rows[first]) * self.row_bytes)

    def read(self, rows: Indices) -> Array:
        """[k, *shape] of these rows [k]. Raises StoreError."""
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        with store_errors("read rows of", "a nameless file", out.nbytes):
            for first, last in _runs(rows) if out.nbytes else ():
                rest, offset = memoryview(out[first:last].data).cast("B"), int(rows[first]) * self.row_bytes
                while rest:
                    if not (got := os.preadv(self._descriptor, [rest], offset)):
                        raise StoreError(f"rows at byte {offset} of {self.nbytes} are gone")
                    rest, offset = rest[got:], offset + got
        return out


class FileRows:
    """Some rows of a file, in an order of their own; taking rows of it copies no values."""

    def __init__(self, file: RowFile, places: Indices) -> None:
        self._file = file
        self._places = places
        self.dtype = file.dtype
        self.shape = (len(places), *file.shape[1:])
        self.ndim = len(self.shape)
        #: Size of these rows, were they in memory, and of the whole file.
        self.nbytes, self.file_bytes = len(places) * file.row_bytes, file.nbytes

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, rows: Array | slice) -> Array:
        """The values of rows (indices or flags), read now."""
        return self._file.read(self._places[rows])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)

    def take(self, rows: Indices) -> FileRows:
        """These rows, without reading them."""
        return FileRows(self._file, self._places[rows])


#: The values of one modality [N, *shape], in memory or on disk.
Rows = Array | FileRows


def on_disk(values: Rows, folder: Path) -> FileRows:
    """The same values in a file. Raises StoreError."""
    if isinstance(values, FileRows):
        return values
    file = RowFile(folder, values.shape, values.dtype)
    step = max(1, _COPY_BYTES // max(1, file.row_bytes))
    for start in range(0, len(values), step):
        block = values[start : start + step]
        file.write(np.arange(start, start + len(block)), block)
    return FileRows(file, np.arange(len(values)))


def chosen(values: Rows, rows: Indices) -> Rows:
    """The rows of ``values``: of an array a copy, of a file none."""
    return values.take(rows) if isinstance(values, FileRows) else values[rows]


def _runs(rows: Indices) -> list[tuple[int, int]]:
    """(first, last + 1) positions of neighbouring rows that lie beside each other in the file."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]
