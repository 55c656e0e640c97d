"""Mean and deviation of a figure over seeds, in a table's words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], *, signed: bool = False) -> str:
    """ "89.8 ± 1.6"; of one value the value alone. ``signed``: differences, with their sign."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{'+' if signed else ''}.1f}{deviation}"
