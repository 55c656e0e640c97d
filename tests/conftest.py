"""What every test shares: quiet libraries and where the data sets are."""

from __future__ import annotations

import os

# Several workers share two cores: one thread each, set before torch or numpy are imported anywhere.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a model hub
