"""Pages of files mapped into the process: given back to the kernel after use, while the values stay on disk."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from weakref import ref

import numpy as np

from edgefl.storage.disk import store_errors

#: Values copied at a time. Bytes.
BLOCK_BYTES = 4 * 2**20
_PAGE = mmap.PAGESIZE
#: First address -> (end, mapping) of what ``known`` was told of. A mapping that is gone is never asked.
_MAPPINGS: dict[int, tuple[int, ref[mmap.mmap]]] = {}


def known(mapping: mmap.mmap) -> mmap.mmap:
    """The mapping, whose pages ``let_go`` may give back from now on."""
    start = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    for gone in [at for at, (_, one) in _MAPPINGS.items() if one() is None]:
        del _MAPPINGS[gone]
    _MAPPINGS[start] = start + len(mapping), ref(mapping)
    return mapping


def new_file(size: int, folder: Path) -> mmap.mmap:
    """A file of zeros without a name, shared with the process' memory. Raises StoreError when the disk is full."""
    with store_errors("write", folder, size), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a signal later
        return known(mmap.mmap(file.fileno(), size))


def let_go(values: np.ndarray) -> None:
    """Give back the pages of contiguous values that lie in a known mapping; others stay as they are."""
    begin = values.__array_interface__["data"][0]
    for start, (end, one) in _MAPPINGS.items():
        mapping = one()
        if mapping is not None and start <= begin and begin + values.nbytes <= end:
            first = (begin - start) // _PAGE * _PAGE
            mapping.madvise(mmap.MADV_DONTNEED, first, begin - start + values.nbytes - first)


def copied(source: np.ndarray, target: np.ndarray) -> None:
    """Copy ``source`` into ``target`` of its shape, a block at a time where they are large; neither's pages stay."""
    for some in blocks_of(target):
        np.copyto(target[some], source[some], casting="unsafe")
        if target.nbytes > BLOCK_BYTES:
            let_go(source[some])
            let_go(target[some])


def blocks_of(values: np.ndarray) -> Iterator[slice | EllipsisType]:
    """Slices of the first axis of about BLOCK_BYTES each; all of it where there is no axis."""
    if values.nbytes <= BLOCK_BYTES or not values.ndim:
        yield ...
        return
    step = max(1, BLOCK_BYTES * len(values) // values.nbytes)
    yield from (slice(first, first + step) for first in range(0, len(values), step))
