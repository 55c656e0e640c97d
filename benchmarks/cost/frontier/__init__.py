"""The frontier of cost and accuracy over whole runs of each schedule."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.claims.study import Study

#: Folder of the lines and plots.
RESULTS = Path("docs/results/frontier")


def study() -> Study:
    """What is run: ``frontier.yaml``."""
    return Study("frontier", Path(__file__).resolve().parent)
