"""glibc's heap, simulated: what stays resident while blocks come and go.

A freed block joins its free neighbours, and a request takes the smallest hole that it fits into, or else the heap's
end. So the heap keeps holes between blocks that live longer, and a step takes more memory than its tensors do at their
largest moment. A trainer's glibc does this without its caches of small blocks (``process_memory.without_caches``). What
is free at the end stays here, as in a step some small block mostly lies behind it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

#: A storage made (its number, its bytes) or freed (minus its number, its bytes).
Event = tuple[int, int]
#: malloc.c's head of a block, and torch's alignment, whose remainder is too small for any tensor.
_HEAD, _ALIGNED = 16, 64
#: Of the kernel, which a mapping is rounded up to.
_PAGE = 4096


class Heap:
    """Best fit with coalescing. ``peak``: most bytes resident, mapped blocks included.

    ``mapped_bytes``: size from which a block is a mapping of its own, which the kernel has back when it is freed.
    """

    def __init__(self, mapped_bytes: int) -> None:
        self.peak = 0
        self._mapped_bytes = mapped_bytes
        self._mapped = 0  # bytes in mappings
        self._end = self._kept = 0  # of the last block; of what is resident
        self._holes: list[tuple[int, int]] = []  # (size, address), ascending
        self._size_at: dict[int, int] = {}  # of the hole that begins there
        self._begin_of: dict[int, int] = {}  # of the hole that ends there
        self._blocks: dict[int, tuple[int, int]] = {}  # number -> (address, size); a mapping's address is -1

    def run(self, events: Iterable[Event]) -> None:
        """Take and free blocks in this order; frees of unknown numbers are left out."""
        for number, size in events:
            if number > 0:
                self._take(number, size)
            elif -number in self._blocks:
                self._free(-number)

    def _take(self, number: int, size: int) -> None:
        if size >= self._mapped_bytes:
            size = -(-(size + _HEAD) // _PAGE) * _PAGE
            self._mapped += size
            self._blocks[number] = (-1, size)
        else:
            size = -(-(size + _HEAD) // _ALIGNED) * _ALIGNED
            place = bisect_left(self._holes, (size, -1))
            if place < len(self._holes):
                hole, begin = self._holes[place]
                self._fill(begin, hole)
                if hole > size:
                    self._leave(begin + size, hole - size)
            else:
                begin, self._end = self._end, self._end + size
                self._kept = max(self._kept, self._end)
            self._blocks[number] = (begin, size)
        self.peak = max(self.peak, self._kept + self._mapped)

    def _free(self, number: int) -> None:
        begin, size = self._blocks.pop(number)
        if begin < 0:
            self._mapped -= size
            return
        if (after := self._size_at.get(begin + size)) is not None:
            self._fill(begin + size, after)
            size += after
        if (before := self._begin_of.get(begin)) is not None:
            self._fill(before, begin - before)
            begin, size = before, size + begin - before
        if begin + size < self._end:
            self._leave(begin, size)
            return
        self._end = begin

    def _leave(self, begin: int, size: int) -> None:
        insort(self._holes, (size, begin))
        self._size_at[begin], self._begin_of[begin + size] = size, begin

    def _fill(self, begin: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, begin))]
        del self._size_at[begin], self._begin_of[begin + size]


def peak_of_steps(before: list[Event], state: list[Event], step: list[Event], mapped_bytes: int, steps: int) -> int:
    """Most bytes resident in the first step after ``before``, or with more ``steps`` in two of them.

    ``state`` is what the first one leaves, an optimiser's. What of a step is alive at its end, gradients, is freed when
    the next begins.
    """
    heap = Heap(mapped_bytes)
    heap.run(before)
    heap.run(step)
    heap.run(state)
    if steps > 1:
        heap.run((-number, 0) for number, _ in step if number > 0)
        most = max(number for number, _ in step)
        heap.run((number + most if number > 0 else number - most, size) for number, size in step)
    return heap.peak
