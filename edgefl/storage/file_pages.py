"""Pages of files mapped into the process: given back to the kernel after use, while the values stay on disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from edgefl.storage.disk import nameless_file, store_errors

if TYPE_CHECKING:
    import numpy as np

#: Values copied at a time. Bytes.
BLOCK_BYTES = 4 * 2**20
_PAGE = mmap.PAGESIZE
#: Address -> mapping that ``known`` was told of.
_MAPPINGS: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()


def known(mapping: mmap.mmap) -> mmap.mmap:
    """The mapping, whose pages ``let_go`` may give back from now on."""
    _MAPPINGS[_address(mapping)] = mapping
    return mapping


def new_file(size: int, folder: Path) -> mmap.mmap:
    """A file of zeros without a name, shared with the process' memory. Raises StoreError when the disk is full."""
    descriptor = nameless_file(folder, size)
    try:
        with store_errors("map a file in", folder, size):
            return known(mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)


def let_go(values: np.ndarray) -> None:
    """Give back the pages of contiguous values that lie in a known mapping; others stay as they are."""
    if not _MAPPINGS:
        return
    begin = _address(values)
    for one in _MAPPINGS.valuerefs():  # a list: other threads map files meanwhile
        start, mapping = one.key, one()
        if mapping is not None and start <= begin and begin + values.nbytes <= start + len(mapping):
            first = (begin - start) // _PAGE * _PAGE
            mapping.madvise(mmap.MADV_DONTNEED, first, begin - start + values.nbytes - first)


def _address(values: np.ndarray | mmap.mmap) -> int:
    import numpy as np  # supervisors store objects, and have no arrays

    held = values if isinstance(values, np.ndarray) else np.frombuffer(values, np.uint8)
    return int(held.__array_interface__["data"][0])


def copied(source: np.ndarray, target: np.ndarray) -> None:
    """Copy ``source`` into ``target`` of its shape, a block at a time where they are large; neither's pages stay."""
    import numpy as np

    for some in blocks_of(target):
        np.copyto(target[some], source[some], casting="unsafe")
        let_go(source[some])
        let_go(target[some])


def blocks_of(values: np.ndarray) -> Iterator[slice | EllipsisType]:
    """Slices of the first axis of about BLOCK_BYTES each; all of it where there is no axis."""
    if values.nbytes <= BLOCK_BYTES or not values.ndim:
        yield ...
        return
    step = max(1, BLOCK_BYTES * len(values) // values.nbytes)
    yield from (slice(first, first + step) for first in range(0, len(values), step))
