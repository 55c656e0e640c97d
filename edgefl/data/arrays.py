"""Array files, read with limits and written atomically; pickles are neither read nor written.

A header that promises more than the file holds, or more than the limit, is refused before memory is taken.
"""

from __future__ import annotations

import math
import os
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
#: Floats, signed and unsigned integers, booleans, unicode. No objects, no structures.
_KINDS = "fiubU"
#: What numpy and zipfile raise for a damaged or hostile file.
_DAMAGE = (ValueError, KeyError, EOFError, OSError, SyntaxError, RuntimeError, NotImplementedError, zlib.error)


def read_npy(path: Path) -> Array:
    """The array of a .npy file of at most MAX_FILE_BYTES. Raises DataError, or OSError when it can't be opened."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise DataError(f"the file has {size} bytes, more than the limit of {MAX_FILE_BYTES}")
    with path.open("rb") as file:
        try:
            _check_header(file, size)
            file.seek(0)
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
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
            return {m.filename[:-4]: _read_member(archive, m) for m in members}
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file", remedy="Check the path of the data set.") from None
    except (zipfile.BadZipFile, *_DAMAGE) as error:
        remedy = "Write the file anew, for instance with numpy.savez or `edgefl data --out`."
        raise DataError(f"{path}: not a readable .npz file: {error}", remedy=remedy) from None


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with archive.open(member) as file:
        _check_header(file, member.file_size)
    with archive.open(member) as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _check_header(file: IO[bytes], size: int) -> None:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"format version {version} is not supported")
    if dtype.kind not in _KINDS or dtype.hasobject:
        raise ValueError(f"values of type {dtype} are not accepted; store numbers")
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"its header promises shape {shape}, more than the file holds")


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
