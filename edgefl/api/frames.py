"""Rows as pandas data frames: columns typed and named, in base units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from edgefl.api.needs import explained
from edgefl.report import tables
from edgefl.run_records import RunReport

if TYPE_CHECKING:
    import pandas as pd

Table = Literal["figures", "budgets", "rounds", "scores", "totals", "refusals", "devices"]
Row = Sequence[object]


@explained("to_pandas")
def frame(types: Mapping[str, str], rows: Iterable[Row]) -> pd.DataFrame:
    """A data frame. ``types``: column -> dtype, in the order of each row; None is a missing value (NaN, <NA>)."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(types)).astype(dict(types))


def report_frame(report: RunReport, table: Table) -> pd.DataFrame:
    """A table of a run, as the CSV report has it."""
    types, rows = tables.table(report, table)
    return frame(types, rows)
