"""The ledger's tables: what the migrations make of an empty SQLite file, and what the metadata are on PostgreSQL."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from coordinator.ledger import tables
from coordinator.ledger.ledger import Ledger
from pins.golden import check


def test_on_sqlite(tmp_path: Path):
    Ledger(tmp_path / "ledger.sqlite").close()
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    made = connection.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    connection.close()
    check("ledger.json", "sqlite", {name: flat(sql) for name, sql in made})
    check("ledger.json", "revision", revision)


def test_on_postgresql():
    made = {}
    for table in tables.metadata.sorted_tables:
        made[f"table {table.name}"] = flat(str(CreateTable(table).compile(dialect=postgresql.dialect())))
        for index in table.indexes:
            made[f"index {index.name}"] = flat(str(CreateIndex(index).compile(dialect=postgresql.dialect())))
    check("ledger.json", "postgresql", made)


def flat(sql: str) -> str:
    """The statement with single blanks."""
    return " ".join(sql.split())
