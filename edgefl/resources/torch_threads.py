"""How many threads torch computes with in this process."""

from __future__ import annotations

import os


def set_threads(count: int) -> int:
    """Have torch compute with so many threads, unless the environment says how many; how many there were before.

    A fleet's processes compute with one thread each: sums split among threads round otherwise.
    """
    import torch

    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(count)
    return before
