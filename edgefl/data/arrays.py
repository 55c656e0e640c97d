"""Array files, read with limits and written atomically; pickles are neither read nor written.

A header that promises more than the file holds, or more than the limit, is refused before memory is taken.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from edgefl.errors import DataError, StoreError

Array = npt.NDArray[Any]

#: One .npy, image or sound file. A 4096 x 4096 x 3 float32 image has 192 MiB; a sample of an edge device has far less.
MAX_FILE_BYTES = 64 * 2**20
#: A whole data set in memory. The smallest device this project names has 4 GB of memory for everything.
MAX_DATASET_BYTES = 4 * 2**30
#: Bytes read at a time.
_BLOCK_BYTES = 2**20
#: Floats, signed and unsigned integers, booleans, unicode. No objects, no structures.
_KINDS = "fiubU"
#: Deflate packs 1032 bytes into one at most: a member that claims more lies about its size.
_DEFLATE_MOST = 1032
#: A .npy header as numpy writes it, its three fields in any order. Numpy's own reader evaluates Python and gives memory
#: to whatever shape that names.
_HEADER = re.compile(rb"\{(?: ?'(?:descr|fortran_order|shape)': ?(?:'[^'()]*'|True|False|\([0-9L, ]*\)),?){3} ?\}")
_DESCR = re.compile(rb"'descr': ?'([^']*)'")
_SHAPE = re.compile(rb"'shape': ?\(([^)]*)\)")
_FORTRAN = re.compile(rb"'fortran_order': ?(True|False)")
MAX_HEADER_BYTES = 10_000  # as numpy's own limit
_MAX_AXES = 32
#: What numpy and zipfile raise for a damaged or hostile file.
_DAMAGE = (ValueError, KeyError, EOFError, OSError, SyntaxError, RuntimeError, NotImplementedError, zlib.error)


def read_npy(path: Path) -> Array:
    """The array of a .npy file of at most MAX_FILE_BYTES. Raises DataError, or OSError when it can't be opened."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise DataError(f"the file has {size} bytes, more than the limit of {MAX_FILE_BYTES}")
    with path.open("rb") as file:
        try:
            return _read_array(file, size)
        except _DAMAGE as error:
            raise DataError(f"not a readable .npy file: {error}") from None


def read_npz(path: Path, wanted: Collection[str] | None = None) -> dict[str, Array]:
    """The arrays of a .npz file (only the ``wanted`` ones), MAX_DATASET_BYTES at most in all. Raises DataError."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            if wanted is not None:
                members = [m for m in members if m.filename[:-4] in wanted]
            total = sum(m.file_size for m in members)
            if total > MAX_DATASET_BYTES:
                raise DataError(f"{path}: {total} bytes of arrays, more than the limit of {MAX_DATASET_BYTES}")
            return {m.filename[:-4]: _read_member(archive, m, path.stat().st_size) for m in members}
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file", remedy="Check the path of the data set.") from None
    except (zipfile.BadZipFile, *_DAMAGE) as error:
        remedy = "Write the file anew, for instance with numpy.savez or `edgefl data --out`."
        raise DataError(f"{path}: not a readable .npz file: {error}", remedy=remedy) from None


def npz_names(path: Path) -> list[str]:
    """The names of the arrays in a .npz file that :func:`read_npz` can read."""
    with zipfile.ZipFile(path) as archive:
        return [name[:-4] for name in archive.namelist() if name.endswith(".npy")]


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, archive_bytes: int) -> Array:
    """One array. What a member says of its size has to be possible before memory is taken for it."""
    name = member.filename[:80]
    if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError(f"{name!r} is packed in a way that numpy does not write")
    most = _DEFLATE_MOST if member.compress_type == zipfile.ZIP_DEFLATED else 1
    packed = min(member.compress_size, archive_bytes - member.header_offset)
    if member.file_size > most * packed:
        raise ValueError(f"{name!r} claims {member.file_size} bytes, and {packed} are there")
    with archive.open(member) as file:
        return _read_array(file, member.file_size)


def _read_array(file: IO[bytes], size: int) -> Array:
    """The array in ``file`` of ``size`` bytes. Raises ValueError, EOFError."""
    version = np.lib.format.read_magic(file)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"format version {version} is not supported")
    length = int.from_bytes(file.read(2 * version[0]), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes, at most {MAX_HEADER_BYTES} can be right")
    dtype, shape, fortran = _parse_header(file.read(length).strip())
    count = math.prod(shape)
    if dtype.kind not in _KINDS or dtype.hasobject:
        raise ValueError(f"values of type {dtype} are not accepted; store numbers")
    rows = max([count, *shape[:1]])  # of nothing, or of texts without a letter, a file of no size could hold any number
    if count * dtype.itemsize > size or rows > max(size, MAX_HEADER_BYTES):
        raise ValueError(f"its header promises shape {shape}, more than the file holds")
    array = np.empty(count, dtype)
    rest = memoryview(array.view(np.uint8).data) if array.nbytes else memoryview(b"")
    while rest:
        if not (block := file.read(min(len(rest), _BLOCK_BYTES))):
            raise EOFError("it ends early")
        rest[: len(block)] = block
        rest = rest[len(block) :]
    _check_values(array)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    descr, shape, fortran = (form.search(header) for form in (_DESCR, _SHAPE, _FORTRAN))
    if not _HEADER.fullmatch(header) or descr is None or shape is None or fortran is None:
        raise ValueError(f"its header is not what numpy writes for numbers: {header[:60].decode('latin-1')!r}")
    sizes = [one.strip().rstrip(b"L") for one in shape[1].split(b",")]
    if not all(one.isdigit() and len(one) < 20 for one in sizes[:-1]) or len(sizes) > _MAX_AXES:
        raise ValueError(f"its header promises the shape ({shape[1][:60].decode('latin-1')})")
    last = [int(sizes[-1])] if sizes[-1].isdigit() and len(sizes[-1]) < 20 else []
    try:
        dtype = np.dtype(descr[1].decode("latin-1"))
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"values of type {descr[1][:40].decode('latin-1')!r} are not accepted; store numbers"
        ) from error
    return dtype, (*(int(one) for one in sizes[:-1]), *last), fortran[1] == b"True"


def _check_values(array: Array) -> None:
    """Bits that are no value of the type: numpy would take them and fail, or go wrong, much later."""
    if array.dtype.kind == "b":
        np.not_equal(array.view(np.uint8), 0, out=array)
    if array.dtype.kind == "U" and array.nbytes:
        letters = array.view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if ((letters > 0x10FFFF) | ((letters >= 0xD800) & (letters <= 0xDFFF))).any():
            raise ValueError("a text holds what is no character")


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a .npz: whole or not at all (temporary name, sync, rename), byte-equal for equal arrays.

    Raises StoreError when the disk refuses.
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
                        np.lib.format.write_array(target, np.asanyarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: can not be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random generator for one purpose (such as a device's name): independent of the order of purposes."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])
