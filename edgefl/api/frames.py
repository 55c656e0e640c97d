"""Rows as pandas data frames: columns typed and named, in base units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from edgefl.api.needs import explained
from edgefl.report.parquet import FIGURE_TYPES
from edgefl.report.resources import step_limit
from edgefl.report.writers import figure_rows
from edgefl.run_records import RunReport

if TYPE_CHECKING:
    import pandas as pd

Table = Literal["figures", "scores", "devices"]
Row = Sequence[object]
#: Of the global model on the test set; ``value`` is a share of one where ``metric`` is accuracy or recall.
SCORE_TYPES = {
    **dict.fromkeys(("run", "given", "mask", "metric"), "string"),
    **dict.fromkeys(("stage", "round"), "int64"),
    "value": "float64",
}
#: ``samples`` in all; budgets in bytes, FLOPs and joules a round, missing: no limit. ``step_memory_limit``: from
#: whichever of the device's memory budgets is tightest.
DEVICE_TYPES = {
    **dict.fromkeys(("run", "device", "profile"), "string"),
    "samples": "int64",
    **dict.fromkeys(("step_memory_limit", "payload_limit", "flops_limit", "energy_limit", "disk_limit"), "float64"),
}


@explained("to_pandas")
def frame(types: Mapping[str, str], rows: Iterable[Row]) -> pd.DataFrame:
    """A data frame. ``types``: column -> dtype, in the order of each row; None is a missing value (NaN, <NA>)."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(types)).astype(dict(types))


def report_frame(report: RunReport, table: Table) -> pd.DataFrame:
    """A run's figures (those of the CSV report), scores or devices, a row each."""
    if table == "scores":
        return frame(SCORE_TYPES, _scores(report))
    if table == "devices":
        return frame(DEVICE_TYPES, _devices(report))
    return frame(FIGURE_TYPES, figure_rows(report))


def _scores(report: RunReport) -> Iterator[Row]:
    for row in report.evaluations:
        given = " + ".join(row.available)
        yield report.run, given, row.missing, row.metric, row.stage, row.round, row.value


def _devices(report: RunReport) -> Iterator[Row]:
    for row in report.devices:
        budget = row.budget
        limits = (step_limit(row), budget.payload_bytes, budget.flops, budget.energy_j, budget.disk_bytes)
        yield report.run, row.device, row.profile, row.samples.get("", 0), *limits
