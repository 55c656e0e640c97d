"""The C library's allocator, set up so that a trainer gives memory back, and whoever moves chunks keeps it.

glibc serves blocks below a threshold from heaps that can only shrink from their end, and raises that threshold to 32
MiB as larger blocks are freed. A training step then keeps a third more than it uses (measured: 535 MiB for 331 that are
alive, decision 0016). Here the threshold stays: every larger tensor is a mapping of its own, in huge pages where the
kernel allows it, so that mapping it again costs little. Micro-batches have smaller tensors, and who takes them is short
of memory: there the threshold is lower.

A program that moves chunks is the other way round: its buffers are small beside what it may hold, and glibc maps and
zeroes them again for every message (decision 0021: 16,000 page faults for 28 MB received).
"""

from __future__ import annotations

import ctypes
import os
import sys

#: Larger blocks are mapped by themselves. Bytes.
MAPPED_BYTES = 2 * 2**20
#: The same where a batch is run in pieces: tensors of 8 rows lie between the two, and the heap kept some 200 MiB of
#: them that were free (decision 0016).
MAPPED_BYTES_IN_PIECES = 2**18
#: The end of the heap that may stay there unused. Bytes.
TRIM_BYTES = 4 * 2**20
#: The same, of each thread's heap, for chunks of up to 768 KiB, some of which are on their way.
CHUNKS_KEPT_BYTES = 8 * 2**20
#: The same for parts that are added up. The most that glibc does not map by itself.
PARTS_KEPT_BYTES = 32 * 2**20
#: malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_back_at_once(*, in_pieces: bool = False) -> bool:
    """Set it up, of this process; before torch is imported, and again before rounds that run batches otherwise.

    ``in_pieces``: micro-batches come. Whether the C library can do it (glibc can, musl not). Holes that a heap has by
    then are filled first.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for huge pages of what it maps
    return _set(MAPPED_BYTES_IN_PIECES if in_pieces else MAPPED_BYTES, TRIM_BYTES)


def keep_for_chunks() -> bool:
    """Keep up to CHUNKS_KEPT_BYTES of freed memory for a supervisor's next chunks. Whether the C library can do it."""
    return _set(MAPPED_BYTES, CHUNKS_KEPT_BYTES)


def keep_for_parts() -> bool:
    """Keep up to PARTS_KEPT_BYTES of freed memory for a coordinator's next parts. Whether the C library can do it."""
    return _set(PARTS_KEPT_BYTES, PARTS_KEPT_BYTES)


def _set(mapped_bytes: int, trim_bytes: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, mapped_bytes), mallopt(_M_TRIM_THRESHOLD, trim_bytes)])
