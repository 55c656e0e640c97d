"""A run's tables as Parquet: the rows of the CSV, with typed columns."""

from __future__ import annotations

from edgefl.report.tables import table
from edgefl.report.writers import SCHEMA
from edgefl.run_records import RunReport


def to_parquet(report: RunReport, name: str = "figures") -> bytes:
    """A table, in the base units that its columns name; a missing number is null.

    Texts are those of the ledger: without the quotes that keep a spreadsheet from taking them for formulas. The file's
    metadata names the report's form. Needs the extra ``parquet``.
    """
    import pyarrow as pa
    from pyarrow import parquet

    types, rows = table(report, name)
    fields = [(column, pa.type_for_alias(kind)) for column, kind in types.items()]
    schema = pa.schema(fields, metadata={"edgefl.schema": SCHEMA})
    records = [dict(zip(types, row, strict=True)) for row in rows]
    out = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(records, schema=schema), out)
    return bytes(out.getvalue())
