"""Where a device lays the weights of large linear maps and embeddings: decision 0096."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from edgefl.models.row_linear import by_rows, in_files
from edgefl.plan.job import LEAST_BYTES_ON_DISK, Job


def on_disk(job: Job, folder: Path) -> Callable[[nn.Module], None] | None:
    """What lays the large weights of a new part into files of ``folder``, where the job asks for it."""
    return partial(by_rows, least_bytes=LEAST_BYTES_ON_DISK, folder=folder) if job.hyper.weights == "disk" else None


def bytes_on_disk(job: Job, model: nn.Module) -> int:
    """Bytes of the weights on the meta device that training lays into files."""
    if (settle := on_disk(job, Path())) is None:
        return 0
    settle(model)
    return sum(one.weight.nbytes for one in in_files(model))
