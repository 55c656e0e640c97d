"""What every test shares: quiet libraries and where the data sets are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Several workers share two cores: one thread each, set before torch or numpy are imported anywhere.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# One set of vector instructions wherever the tests run: left to themselves, MKL, oneDNN and ATen choose kernels by the
# processor's model, whose sums differ in their last bits, and runs are pinned. MKL's still differ between makers.
for name, value in {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a model hub

# A first example pays for lazy imports, and machines in CI are slow: each test's own time limit is enough.
settings.register_profile("edgefl", deadline=None)
settings.load_profile("edgefl")


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: for tests that write thousands of synced files and need no disk."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="edgefl-", dir=shared) as name:
        yield Path(name)
