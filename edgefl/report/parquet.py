"""A run's figures as Parquet: the rows of the CSV, with typed columns."""

from __future__ import annotations

from edgefl.report.writers import CSV_COLUMNS, SCHEMA, figure_rows
from edgefl.run_records import RunReport

#: Columns that are no texts.
_NUMBERS = {
    **dict.fromkeys(("stage", "round", "attempt"), "int64"),
    **dict.fromkeys(("predicted", "measured", "needed", "allowed"), "float64"),
}


#: Column -> name of its type, in the order of ``figure_rows``.
FIGURE_TYPES = {name: _NUMBERS.get(name, "string") for name in CSV_COLUMNS}


def to_parquet(report: RunReport) -> bytes:
    """A row per device, attempt and figure, in the base unit that its column ``unit`` names; a missing number is null.

    Texts are those of the ledger: without the quotes that keep a spreadsheet from taking them for formulas. The file's
    metadata names the report's form. Needs the extra ``parquet``.
    """
    import pyarrow as pa
    from pyarrow import parquet

    fields = [(name, pa.type_for_alias(kind)) for name, kind in FIGURE_TYPES.items()]
    schema = pa.schema(fields, metadata={"edgefl.schema": SCHEMA})
    rows = [dict(zip(FIGURE_TYPES, row, strict=True)) for row in figure_rows(report)]
    out = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), out)
    return bytes(out.getvalue())
