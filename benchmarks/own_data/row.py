"""One run of a data set: its scores beside the baselines'."""

from __future__ import annotations

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One set, one split. ``scores``: accuracies in percent; ``same_file``: why predict refused the source, "": taken.

    ``error``: why there is no model, "": there is one; ``seconds`` of init and run; ``peak_mib`` of the whole run.
    """

    name: str
    seed: int
    kind: str
    samples: int = 0
    tested: int = 0
    seconds: float = 0.0
    scores: dict[str, float] = {}
    peak_mib: int = 0
    same_file: str = ""
    error: str = ""
