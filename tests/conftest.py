"""What every test shares: quiet libraries and where the data sets are."""

from __future__ import annotations

import os

from hypothesis import settings

# Several workers share two cores: one thread each, set before torch or numpy are imported anywhere.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a model hub

# A first example pays for lazy imports, and machines in CI are slow: each test's own time limit is enough.
settings.register_profile("edgefl", deadline=None)
settings.load_profile("edgefl")
