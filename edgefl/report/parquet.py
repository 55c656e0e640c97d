"""A run's figures as Parquet: the rows of the CSV, with typed columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    return parquet_file(FIGURE_TYPES, figure_rows(report), SCHEMA)


def parquet_file(columns: Mapping[str, str], rows: Iterable[Sequence[object]], form: str) -> bytes:
    """``columns``: name -> Arrow's name of the type, in the order of each row; ``form`` goes into the metadata."""
    import pyarrow as pa
    from pyarrow import parquet

    fields = [(name, pa.type_for_alias(kind)) for name, kind in columns.items()]
    schema = pa.schema(fields, metadata={"edgefl.schema": form})
    out = pa.BufferOutputStream()
    parquet.write_table(
        pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows], schema=schema), out
    )
    return bytes(out.getvalue())
